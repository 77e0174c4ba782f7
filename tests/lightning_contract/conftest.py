def pytest_addoption(parser):
    parser.addoption(
        "--record-hooks",
        action="store_true",
        help="write the order of hooks that is found to tests/lightning_contract/golden/ instead of comparing with it",
    )
