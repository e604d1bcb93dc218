"""``python -m qewqew_core`` is the command ``qewqew``."""

from qewqew_core.cli.main import main

if __name__ == "__main__":
    main()
