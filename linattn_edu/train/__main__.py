"""Train a language model on the novels, and save it; the defaults made the model that ships with the package.

    python -m linattn_edu.train --mixers gated_deltanet,gated_deltanet,gated_deltanet,softmax --out runs/hybrid
    torchrun --nproc-per-node 2 -m linattn_edu.train --device cuda --bf16 --checkpoint runs/hybrid.ckpt ...

With --checkpoint the same command, given again after a kill, goes on where the file was last written.
"""

import argparse
import csv
import dataclasses
import datetime
import hashlib
import io
import json
import shlex
from pathlib import Path

import torch

from linattn_edu import models, validate
from linattn_edu.extras import need
from linattn_edu.models import byte_lm
from linattn_edu.models.storage import SUFFIX
from linattn_edu.train import evaluate, parallel, summary, train
from linattn_edu.train.checkpoint import replace

RECIPE = ("steps", "batch", "length", "lr", "warmup", "weight_decay", "seed")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    default = models.ByteLMConfig()
    first, *rest = __doc__.split("\n\n")
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m linattn_edu.train", description=first, epilog="\n\n".join(rest), formatter_class=style
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("byte_lm"),
        help="weights, record, log and plot are OUT.npz.xz or OUT.safetensors, OUT.json, OUT.csv, OUT.png",
    )
    add(
        "--mixers",
        default=",".join(default.mixers),
        help=f"a mixer a layer, separated by commas: {', '.join(models.MIXERS)}",
    )
    add(
        "--rope",
        default=",".join(default.rope),
        help="mixers among softmax and linear whose q and k are rotated by position",
    )
    add("--width", type=int, default=default.width)
    add("--heads", type=int, default=default.heads)
    add("--hidden", type=int, default=default.hidden, help="width of the SwiGLU layers")
    add("--steps", type=int, default=8500)
    add("--batch", type=int, default=8, help="windows a step, over all processes")
    add("--length", type=int, default=256, help="bytes a window")
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--warmup", type=int, default=100, help="steps up to the peak; 0 for none")
    add("--weight_decay", type=float, default=0.1)
    add("--seed", type=int, default=0, help="of weights and windows")
    add("--validate_every", type=int, default=500, help="steps; 0 for never")
    add("--checkpoint", type=Path, help="a file to go on from, and to write")
    add("--checkpoint_every", type=int, default=500, help="steps")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--brief", action="store_true", help="leave out the last judgement, on the whole unseen novel")
    add("--threads", type=int, default=1)
    add("--device", default="cpu")
    return parser.parse_args(argv)


def build(args: argparse.Namespace) -> models.LanguageModel:
    """Softmax and linear attention alone make a ByteLM, stored like the shipped ones; anything else a LanguageModel."""
    mixers, rotated = args.mixers.split(","), args.rope.split(",") if args.rope else []
    validate.names("rope", rotated, byte_lm.MIXERS)
    if set(mixers) <= set(byte_lm.MIXERS):
        return models.ByteLM(models.ByteLMConfig(args.width, args.heads, mixers, args.hidden, rotated))
    options = {name: {"rope_base": None} for name in byte_lm.MIXERS if name not in rotated}
    sizes = {"width": args.width, "heads": args.heads, "mixers": mixers, "hidden": args.hidden}
    return models.LanguageModel(models.LanguageModelConfig(**sizes, options=options))


def write_log(path: Path, history: list[dict]) -> None:
    """The records as CSV: step, loss, lr, seconds, and validation where there is one."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, ["step", "loss", "lr", "seconds", "validation"], lineterminator="\n")
    table.writeheader()
    table.writerows(history)
    replace(path, lambda file: file.write(text.getvalue().encode()))


def plot(path: Path, history: list[dict]) -> None:
    """Training loss, smoothed over 20 steps, and validation loss against the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    ax = figure.subplots()
    mean = [summary(history[: i + 1], last=20)["loss"] for i in range(len(history))]
    ax.plot([r["step"] for r in history], mean, label="training", lw=1)
    judged = [r for r in history if "validation" in r]
    ax.plot([r["step"] for r in judged], [r["validation"] for r in judged], "o-", label="validation")
    ax.set(xlabel="step", ylabel="loss, nats per byte")
    ax.legend()
    replace(path, lambda file: figure.savefig(file, format="png", dpi=150))


def command(args: argparse.Namespace) -> str:
    """What makes the same model again: paths are left out, and what has its default."""
    parts = ["python", "-m", "linattn_edu.train"]
    for name, value in vars(args).items():
        if name not in ("out", "checkpoint", "checkpoint_every", "brief") and value is not False:
            parts += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(parts)


def store(model: models.LanguageModel, out: Path) -> tuple[Path, models.LanguageModel]:
    """Write the weights; return the file, and the model as it will be read."""
    if isinstance(model, models.ByteLM):
        path = out.with_name(out.name + SUFFIX)
        return path, models.load(models.save(model, path), model.config)
    path = out.with_name(out.name + ".safetensors")
    model.save(path)
    return path, model


def whole_novel(model: models.LanguageModel) -> float:
    print("judging the model on the whole unseen novel ...", flush=True)
    return evaluate(model, count=None)


def main(argv: list[str] | None = None) -> dict | None:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with parallel.processes(args.device) as device:
        model = build(args).to(device)
        if not isinstance(model, models.ByteLM):
            need("safetensors", "a file of this model")  # now, not when there are weights to lose
        settings = {
            name: getattr(args, name) for name in (*RECIPE, "validate_every", "checkpoint", "checkpoint_every", "bf16")
        }
        history = train(model, **settings, timed=True)
        rank, size = parallel.place()
    return conclude(args, model, history, size) if rank == 0 else None


def conclude(args: argparse.Namespace, model: models.LanguageModel, history: list[dict], size: int) -> dict:
    """Write weights, log, plot and record; return the record."""
    path, stored = store(model, args.out)
    write_log(args.out.with_name(args.out.name + ".csv"), history)
    try:
        plot(args.out.with_name(args.out.name + ".png"), history)
    except ImportError:
        print('no plot: it needs matplotlib, pip install "linattn_edu[viz]"')
    seconds = history[-1]["seconds"]
    record = {
        "command": command(args),
        "config": dataclasses.asdict(model.config),
        **{name: getattr(args, name) for name in RECIPE},
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": summary(history)["loss"],
        "validation_loss": evaluate(stored),
        **({} if args.brief else {"validation_loss_whole_novel": whole_novel(stored)}),
        "validation_history": [[r["step"], r["validation"]] for r in history if "validation" in r],
        "seconds": round(seconds),
        "tokens_per_second": round(args.steps * args.batch * args.length / seconds),
        "processes": size,
        "threads": args.threads,
        "device": torch.cuda.get_device_name() if model.head.weight.is_cuda else args.device,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    text = json.dumps(record, indent=1) + "\n"
    replace(args.out.with_name(args.out.name + ".json"), lambda file: file.write(text.encode()))
    print(f"wrote {path} and {args.out}.json, .csv, .png")
    return record


if __name__ == "__main__":
    record = main()
    if record:
        print(f"validation loss {record['validation_loss']:.4f} nats per byte")
