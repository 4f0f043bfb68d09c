"""A loss curve, as a picture and as rows of text."""

from pathlib import Path

import demo


def table(rows: list[dict], ranks: int) -> None:
    """Print the rows that have a held-out loss, beside the mean training loss of the steps since the one before."""
    shown, since = [], []
    for row in rows:
        since.append(row["loss"])
        if "exam" in row:
            speed = round(row["tokens_per_second"])
            shown.append([row["step"], sum(since) / len(since), row["exam"], row["norm"], row["learning_rate"], speed])
            since = []
    columns = ["step", "loss since", "held-out loss", "gradient norm", "learning rate", "tokens/s"]
    demo.table(columns, shown, f"nats a byte; all {ranks} ranks")


def draw(rows: list[dict], levels: dict[str, float], path: Path, title: str) -> bool:
    """Draw the losses of metrics rows, and horizontal lines at `levels`, {what: nats}. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        demo.say("matplotlib is not installed: no picture of the loss curve")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    exams = [row for row in rows if "exam" in row]
    figure, panel = pyplot.subplots(figsize=(7, 3.6))
    panel.plot([row["step"] for row in rows], [row["loss"] for row in rows], lw=0.8, color="tab:blue", label="training")
    held_out = [row["exam"] for row in exams]
    panel.plot([row["step"] for row in exams], held_out, "o-", ms=3, color="tab:orange", label="held out")
    for style, (what, nats) in zip(("--", ":", "-."), levels.items(), strict=False):
        panel.axhline(nats, ls=style, lw=0.8, color="gray", label=f"{what}: {nats:.2f}")
    panel.set(xlabel="step", ylabel="loss, nats a byte", title=title)
    panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return True
