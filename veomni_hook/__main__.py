"""`python -m veomni_hook`: the same as the `veomni-hook` command."""

from veomni_hook.tools.cli.app import main

if __name__ == "__main__":
    main()
