"""Train a ByteLM on the novels and save it; the defaults made the model that ships with the package."""

import argparse
import dataclasses
import datetime
import hashlib
import json
import time
from pathlib import Path

import torch

from linattn_edu import models
from linattn_edu.models.storage import SUFFIX
from linattn_edu.train import evaluate, summary, train


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    default = models.ByteLMConfig()
    parser = argparse.ArgumentParser("python -m linattn_edu.train", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("byte_lm"), help="writes OUT.npz.xz (weights) and OUT.json (record)")
    add("--mixers", default=",".join(default.mixers), help="a mixer a layer, separated by commas")
    add("--rope", default=",".join(default.rope), help="mixers whose q and k are rotated by position")
    add("--width", type=int, default=default.width)
    add("--heads", type=int, default=default.heads)
    add("--hidden", type=int, default=default.hidden, help="width of the SwiGLU layers")
    add("--steps", type=int, default=8500)
    add("--batch", type=int, default=8, help="windows a step")
    add("--length", type=int, default=256, help="bytes a window")
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    add("--device", default="cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    config = models.ByteLMConfig(args.width, args.heads, args.mixers.split(","), args.hidden, args.rope.split(","))
    model = models.ByteLM(config).to(args.device)
    began = time.perf_counter()
    recipe = {name: getattr(args, name) for name in ("steps", "batch", "length", "lr", "seed")}
    history = train(model, **recipe)
    print("judging the model on the whole unseen novel ...", flush=True)
    seconds = time.perf_counter() - began
    packed = models.save(model, args.out.with_name(args.out.name + SUFFIX))
    stored = models.load(packed, config)
    record = {
        "command": "python -m linattn_edu.train "
        + " ".join(f"--{name} {value}" for name, value in vars(args).items() if name != "out"),
        "config": dataclasses.asdict(config),
        **recipe,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": summary(history)["loss"],
        "validation_loss": evaluate(stored),
        "validation_loss_whole_novel": evaluate(stored, count=None),
        "validation_history": [[r["step"], r["validation"]] for r in history if "validation" in r],
        "seconds": round(seconds),
        "threads": args.threads,
        "device": torch.cuda.get_device_name(args.device) if model.head.weight.is_cuda else args.device,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "sha256": hashlib.sha256(packed).hexdigest(),
    }
    args.out.with_name(args.out.name + ".json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"wrote {args.out}{SUFFIX} and {args.out}.json")
    return record


if __name__ == "__main__":
    record = main()
    print(f"validation loss {record['validation_loss']:.4f} nats per byte (weights in float16)")
