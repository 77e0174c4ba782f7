"""Formats of others: Hugging Face OLMoE, safetensors, dense models; and conversions from and to them."""
