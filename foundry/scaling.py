"""`python -m foundry.scaling`."""

if __name__ == "__main__":
    from foundry.core.safe_path import run_command

    run_command("scaling")
