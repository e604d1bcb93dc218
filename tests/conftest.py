import signal


def pytest_configure() -> None:
    # A shell starts what runs in its background with SIGINT ignored, and that is inherited: what the tests start, and
    # interrupt, would not notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)
