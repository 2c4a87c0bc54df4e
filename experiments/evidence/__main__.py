"""The evidence of docs/evidence.md, from text to tables. From the root of the repository:

python -m experiments.evidence pack TEXT .carry      # tokens of each part of the text, compressed: one per call
python -m experiments.evidence plan                  # what is left, and the GPU time that it takes
python -m experiments.evidence rehearse              # the same runs with a tiny model on the CPU, in a scratch folder
python -m experiments.evidence run --seconds 570     # on a GPU: what fits, in the order of the protocol
tar -xf evidence.tar.gz -C docs/evidence             # take the run folders over
python -m experiments.evidence pages                 # tables and figures of docs/evidence from the run folders
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

START = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="prepare parts of the text and compress their tokens")
    packing.add_argument("text", type=Path, help="folder with train.jsonl.xz, …, val.jsonl.xz and the tokenizer")
    packing.add_argument("out", type=Path, help="folder for the compressed parts")
    packing.add_argument("--parts", type=int, nargs="+", default=[1, 2, 3, 4])
    for name, help_text in (("plan", "what is left, and its time"), ("run", "run what fits into the time limit")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument(
            "--runs", type=Path, default=ROOT / "runs" / "evidence", help="run folders of this machine"
        )
        command.add_argument(
            "--stages", nargs="*", default=[], help="only these; run: unless given, tuning final ablation sensitivity"
        )
        command.add_argument(
            "--names", default="*", help="only runs with such names, as angpt-muon-*: several processes can share a GPU"
        )
    running = commands.choices["run"]
    running.add_argument("--seconds", type=float, required=True, help="start nothing that would end later")
    where = Path(os.environ.get("OUT", "."), "evidence.tar.gz")
    running.add_argument(
        "--archive", type=Path, default=where, help="run folders without weights; in $OUT unless given"
    )
    running.add_argument("--parts", type=Path, help="folder of compressed parts of the text to extract first")
    running.add_argument("--requests", type=Path, help="requests of tasks (`angpt eval --write-requests`) to score")
    running.add_argument("--carry-over", action="store_true", help="start a run that must go on in the next call")
    running.add_argument(
        "--commit", default="", help="of the package, noted in summaries where it is not in a git checkout"
    )
    rehearsing = commands.add_parser("rehearse", help="the whole queue with a tiny model on the CPU")
    rehearsing.add_argument("--seconds", type=float, default=60.0)
    commands.add_parser("pages", help="write tables and figures of docs/evidence from its run folders")
    args = parser.parse_args(arguments)

    from experiments.evidence import tokens
    from experiments.evidence.queue import STAGES, Queue, Speed, rehearsal

    if unknown := {*getattr(args, "stages", ())} - {*STAGES}:
        parser.error(f"--stages: unknown {' '.join(sorted(unknown))}; there are {' '.join(STAGES)}")
    if args.command == "pack":
        tokens.pack(args.text, ROOT / "data", args.out, tuple(args.parts))
    elif args.command == "pages":
        from experiments.evidence import pages

        pages.write()
    elif args.command == "rehearse":
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            tokens.make_up(folder)
            queue = Queue(folder / "runs", folder / "evidence", rehearsal(folder), Speed({}, 1e10))
            requests = tokens.make_up_requests(folder / "requests")
            queue.run(args.seconds, folder / "evidence.tar.gz", stages=[*STAGES], requests=requests, start=START)
    elif args.command == "plan":
        queue = Queue(args.runs, names=args.names)
        print(queue.table(args.stages).markdown())
        print("\n" + "\n".join(queue.lines(args.stages)))
    else:
        args.archive = args.archive.resolve()
        os.chdir(ROOT)  # configurations name their data from here
        if args.requests is not None:
            from angpt.evaluation.evaluate import read_requests
            from angpt.evaluation.tasks import choose

            read_requests(args.requests, choose(["paper"]))  # a task that is missing must not be missed hours later
        if args.parts is not None:
            tokens.arrange(args.parts, ROOT)
            print(f"{time.monotonic() - START:5.0f} s  tokens are extracted", flush=True)
        options = {"stages": args.stages, "requests": args.requests, "carry_over": args.carry_over}
        Queue(args.runs, names=args.names).run(args.seconds, args.archive, commit=args.commit, start=START, **options)


if __name__ == "__main__":
    from angpt.errors import UserError

    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
