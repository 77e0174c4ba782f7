"""What people add to: ``comm`` moves tokens to their experts and back, ``precision`` chooses the number formats."""
