"""`python -m foundry`."""

if __name__ == "__main__":
    from foundry.safe_path import leave_current_folder

    leave_current_folder()  # before the imports below

from foundry.cli import main

if __name__ == "__main__":
    main()
