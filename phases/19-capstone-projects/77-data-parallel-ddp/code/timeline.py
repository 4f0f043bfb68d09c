"""`--trace`: one step in four ways, each defect before its cure, and when its messages were under way, as a picture."""

import statistics
import time

import demo
import torch
from comm import TorchComm
from flat import flat_param_numel, gather_flat_grads
from ranks import run_ranks
from ways import BUCKETS, CAP_MB, FLAT, NAIVE, OVERLAP, WAYS, missing_gradients, transformer, true_means, way

STEPS = 7  # traced, after one that is not


class TracedComm(TorchComm):
    """Notes of every all-reduce [begin, end, bytes], in seconds; the end comes from the group's own thread."""

    def __init__(self):
        super().__init__()
        self.spans: list[list] = []

    def _finisher(self, handle, work, result, op=None):
        finish = super()._finisher(handle, work, result, op)
        if op is None:  # a broadcast, say
            return finish
        span = [time.perf_counter(), None, work.numel() * work.element_size()]
        self.spans.append(span)
        handle.get_future().add_done_callback(lambda _: span.__setitem__(1, time.perf_counter()))

        def noted():
            finish()
            span[1] = span[1] or time.perf_counter()

        return noted


def trace_way(rank: int, world_size: int, name: str, steps: int) -> dict:
    """Be one rank: take 1 + `steps` steps in one way; return the first's gradients and costs, the others' traces.

    A trace has, in seconds from the begin of backward: `forward` (negative: when it began), `last` (the last gradient
    was there), `end` (all means are), `spans` of the all-reduces.
    """
    comm, module, last = TracedComm(), transformer(), [0.0]
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: last.__setitem__(0, time.perf_counter()))
    model, backward = way(name, module, comm)
    x, traces = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(rank)), []  # (batch, seq, dim)
    for step in range(steps + 1):
        module.zero_grad(set_to_none=False)
        comm.spans.clear()
        comm.agree(None)  # all ranks start together
        started = time.perf_counter()
        loss = model(x).square().mean()
        begin = time.perf_counter()
        backward(loss)
        end = time.perf_counter()
        if step == 0:
            grads, calls, sent = gather_flat_grads(module), len(comm.spans), sum(span[2] for span in comm.spans)
        else:
            spans = [(a - begin, b - begin) for a, b, _ in comm.spans]
            traces.append({"forward": started - begin, "last": last[0] - begin, "end": end - begin, "spans": spans})
    return {"grads": grads, "calls": calls, "bytes": sent, "traces": traces}


def communication(trace: dict) -> tuple[float, float]:
    """Return (seconds in which any all-reduce was under way, how many of them lay before the last gradient)."""
    total = hidden = reached = 0.0
    for begin, end in sorted(trace["spans"]):
        begin = max(begin, reached)  # counted once where they overlap
        if end > begin:
            total += end - begin
            hidden += max(0.0, min(end, trace["last"]) - begin)
            reached = end
    return total, hidden


def shares_of(trace: dict) -> tuple[float, float]:
    """Return (the share of the step in which it communicates, the share of that before the last gradient)."""
    total, hidden = communication(trace)
    return total / (trace["end"] - trace["forward"]), hidden / total if total else 0.0


def early(trace: dict) -> int:
    """Return how many all-reduces began before the last gradient was there."""
    return sum(begin < trace["last"] for begin, _ in trace["spans"])


def check_costs(claims: demo.Claims, found: dict[str, list[dict]], world_size: int) -> None:
    """Count calls, bytes and early launches of each way; all four give the same mean."""
    module, rows = transformer(), []
    numel, tensors = flat_param_numel(module), sum(1 for _ in module.parameters())
    for name, ranks in found.items():
        rows.append([name, ranks[0]["calls"], ranks[0]["bytes"], max(early(trace) for trace in ranks[0]["traces"])])
    columns = ["way", "all-reduces a step", "bytes", "launched during backward"]
    demo.table(columns, rows, f"{numel:,} parameters in {tensors} tensors, {world_size} ranks, buckets of {CAP_MB} MB")
    calls, sent, launched = ({row[0]: row[i] for row in rows} for i in (1, 2, 3))
    claims.check("naive: one all-reduce a tensor; flat: one", (calls[NAIVE], calls[FLAT]) == (tensors, 1))
    claims.check("both send 4 P bytes", sent[NAIVE] == sent[FLAT] == 4 * numel)
    good = calls[BUCKETS] == calls[OVERLAP] and sent[BUCKETS] == sent[OVERLAP] == 4 * (numel + tensors)
    claims.check("buckets: an all-reduce each, 4 K bytes more", good, f"{4 * tensors:,} bytes")
    during = launched[OVERLAP] >= 1 and not any(launched[name] for name in (NAIVE, FLAT, BUCKETS))
    claims.check("overlap alone sends during backward", during, f"{launched[OVERLAP]} of {calls[OVERLAP]} buckets")
    grads = [rank["grads"] for ranks in found.values() for rank in ranks]
    if world_size <= 2:
        claims.check("all four ways give the same bits", all(torch.equal(each, grads[0]) for each in grads))
    else:
        apart = max((each - grads[0]).abs().max().item() for each in grads)
        claims.check("all four ways give the same mean", apart <= 1e-5 * grads[0].abs().max().item(), f"{apart:.1e}")


def check_missing(claims: demo.Claims, world_size: int) -> None:
    """Ranks that use different layers: what each way makes of it."""
    true, rows, right = true_means(world_size), [], {}
    for name in WAYS:
        ranks = run_ranks(missing_gradients, world_size, name)
        right[name] = {layer: all(same(found[layer], true[layer]) for found in ranks) for layer in true}
        rows.append([name, *("right" if good else "WRONG" for good in right[name].values())])
    columns = ["way", "a: used by rank 0", "b: used by the others", "idle: used by nobody"]
    demo.table(columns, rows, "gradients that ranks miss, without an error anywhere")
    demo.say()
    mixed = world_size == 1 or not (right[NAIVE]["a"] or right[NAIVE]["b"])
    claims.check("naive mixes different layers' gradients", mixed)
    flat = world_size == 1 or [*right[FLAT].values()] == [1, 1, 0]
    claims.check("flat does not, but gives a gradient to what nobody used", flat)
    claims.check("buckets with flags are right", all(right[BUCKETS].values()) and all(right[OVERLAP].values()))


def same(found: torch.Tensor | None, true: torch.Tensor | None) -> bool:
    """Say whether a mean is the true one: None is not zeros."""
    return found is true is None or (found is not None and true is not None and torch.allclose(found, true))


def trace(args) -> int:
    """Run the four ways, check what can be counted, draw rank 0's median step of each; return the exit code."""
    claims, n = demo.Claims(), args.world_size
    found = {name: run_ranks(trace_way, n, name, STEPS) for name in WAYS}
    check_costs(claims, found, n)
    check_missing(claims, n)
    middle, rows = {}, []
    for name, ranks in found.items():
        traces = sorted(ranks[0]["traces"], key=lambda each: each["end"] - each["forward"])
        middle[name] = traces[len(traces) // 2]
        share, hidden = (statistics.median(each) for each in zip(*map(shares_of, traces), strict=True))
        step = middle[name]["end"] - middle[name]["forward"]
        rows.append([name, step * 1e3, f"{share:.0%}", f"{hidden:.0%}"])
    demo.table(["way", "ms a step", "of it communication", "of that during backward"], rows, "medians, rank 0")
    path = demo.out_dir(args) / "timeline.png"
    draw(middle, path)
    demo.say(f"\npicture: {path}")
    return claims.verdict("Four ways to the same mean")


def draw(traces: dict[str, dict], path) -> None:
    """Draw forward, backward and messages of each way's step over time, one panel a way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(traces), 1, figsize=(9, 1.5 * len(traces) + 1), sharex=True, squeeze=False)
    for panel, (name, each) in zip(panels[:, 0], traces.items(), strict=True):
        ms = {key: 1e3 * each[key] for key in ("forward", "last", "end")}
        panel.broken_barh([(ms["forward"], -ms["forward"])], (1.1, 0.8), color="tab:gray")
        panel.broken_barh([(0, ms["last"])], (1.1, 0.8), color="tab:blue")
        bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in each["spans"]]
        panel.broken_barh(bars, (0.1, 0.8), color="tab:orange", edgecolor="black", linewidth=0.4)
        panel.axvline(ms["end"], color="black", linestyle=":")
        panel.set(yticks=[0.5, 1.5], yticklabels=["all-reduces", "computing"])
        panel.set_title(f"{name}: {ms['end'] - ms['forward']:.1f} ms", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("ms since backward began (gray: forward, blue: backward, dotted: all means are there)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
