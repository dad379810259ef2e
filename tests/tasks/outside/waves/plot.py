from foundry.tracking.plot_style import frame


def error_figure(measured, run_name=""):
    if not measured.get("val_error"):
        return None
    figure, axes = frame("Error", None, "mean absolute error", below=run_name)
    axes.plot(*zip(*sorted(measured["val_error"].items()), strict=True))
    return figure
