"""`python -m foundry.lr_find`."""

if __name__ == "__main__":
    from foundry.core.safe_path import run_command

    run_command("lr_find")
