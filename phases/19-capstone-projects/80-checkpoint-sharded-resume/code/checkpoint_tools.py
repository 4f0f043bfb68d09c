"""`python scripts/course.py checkpoint show|verify|convert DIR`: look at a checkpoint, check it, take it elsewhere."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import demo
import wire
from manifest import MANIFEST, CheckpointError, read_manifest
from recheck import recheck
from rotation import complete_checkpoints
from safetensors_files import from_safetensors, to_safetensors
from shardfile import ShardReader
from storage import DISK


def show(folder: Path) -> dict:
    """Return what a checkpoint consists of, from its manifest and headers; or which checkpoints a folder holds."""
    if not (folder / MANIFEST).exists() and (found := complete_checkpoints(folder)):
        return {"checkpoints": [{"step": step, "folder": path.name} | _size(path) for step, path in found]}
    manifest, tensors = read_manifest(folder), []
    manifest.check_files(folder)
    for rank in range(manifest.world_size):
        with ShardReader(folder, rank, manifest, DISK) as reader:
            header, first = reader.read_header().header, {}
            for path, entry in header.paths().items():
                tied = first.setdefault(entry.offset, path) if entry.numel else path
                size = 0 if tied != path else entry.numel * entry.dtype.itemsize
                kind = {"dtype": wire.dtype_name(entry.dtype), "shape": list(entry.shape), "bytes": size}
                tensors.append({"rank": rank, "tensor": path, **kind, "tied_to": "" if tied == path else tied})
    return {**asdict(manifest), "tensors": tensors}


def verify(folder: Path, fast: bool) -> dict:
    """Return for every rank's file whether it is what was saved."""
    files = [{"rank": s.rank, "path": s.path, "problem": problem} for s, problem in recheck(folder, fast=fast)]
    return {"method": "crc32" if fast else "sha256", "files": files, "ok": not any(file["problem"] for file in files)}


def convert(source: Path, target: Path, step: int | None) -> dict:
    """Write a checkpoint as safetensors files, or safetensors files as a checkpoint (of `step`, if they do not say)."""
    if (source / MANIFEST).exists():
        if step is not None:
            raise CheckpointError(f"{source}: a checkpoint says its step itself: leave --step out")
        return {"wrote": [str(path) for path in to_safetensors(source, target)]}
    manifest = from_safetensors(source, target, step or 0)
    return {"wrote": [str(target / name) for name in (*(shard.path for shard in manifest.shards), MANIFEST)]}


def print_shown(found: dict) -> None:
    """Print what `show` returned as tables."""
    if "checkpoints" in found:
        rows = [(c["step"], _printable(c["folder"]), c["ranks"], c["bytes"]) for c in found["checkpoints"]]
        return demo.table(["step", "folder", "ranks", "bytes"], rows)
    rows = [
        (s["rank"], s["path"], s["size"], s["sha256"][:16], s["crc32"] or "-", _ranges(s["layout"]))
        for s in found["shards"]
    ]
    title = f"step {found['step']}, saved by {found['world_size']} ranks in {found['wall_clock_seconds']:g} s"
    demo.table(["rank", "file", "bytes", "sha256", "crc32", "ranges of flat units"], rows, title)
    rows = [
        (t["rank"], _printable(t["tensor"]), t["dtype"], f"{t['shape']}", t["bytes"], _printable(t["tied_to"]))
        for t in found["tensors"]
    ]
    demo.table(["rank", "tensor", "dtype", "shape", "bytes", "tied to"], rows)


def main(argv: list[str] | None = None) -> int:
    """Run one action; exit code 1 if the checkpoint is not good, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="course checkpoint", description=__doc__)
    parser.add_argument("action", choices=["show", "verify", "convert"])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--to", type=Path, metavar="OUT")
    parser.add_argument("--step", type=int)
    args = parser.parse_args(argv)
    if (args.to is None) == (args.action == "convert"):
        parser.error("convert needs --to OUT, and nothing else takes it")
    if args.fast and args.action != "verify":
        parser.error("--fast is for verify")
    if args.step is not None and args.action != "convert":
        parser.error("--step is for convert")
    try:
        if args.action == "show":
            found = show(args.folder)
        elif args.action == "verify":
            found = verify(args.folder, args.fast)
        else:
            found = convert(args.folder, args.to, args.step)
    except (CheckpointError, OSError) as error:
        print(json.dumps({"error": str(error)}) if args.json else f"course checkpoint: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found, indent=1))
    elif args.action == "show":
        print_shown(found)
    elif args.action == "verify":
        for file in found["files"]:
            print(_printable(file["problem"]) or f"ok    {file['path']} ({found['method']})")
    else:
        print("\n".join(found["wrote"]))
    return 0 if found.get("ok", True) else 1


def _size(folder: Path) -> dict:
    manifest = read_manifest(folder)
    return {"ranks": manifest.world_size, "bytes": sum(shard.size for shard in manifest.shards)}


def _ranges(layout: list[dict]) -> str:
    return "; ".join(f"{_printable(item['unit'])} [{item['start']}, {item['end']})" for item in layout) or "-"


def _printable(name: str) -> str:
    """A file's names must not steer the terminal, nor be what it cannot show."""
    return name if name.isprintable() else ascii(name)[1:-1]


if __name__ == "__main__":
    sys.exit(main())
