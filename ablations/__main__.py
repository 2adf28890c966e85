"""``python -m ablations`` is the ``prism`` command, for a checkout that is not installed."""

from ablations.cli import main

if __name__ == "__main__":
    main()
