"""Check a run folder without Lockstep: digests, chain, rewards, advantages, gate, equality of legs.

    python tools/check_run.py RUN

Derives everything again from what the run left, with numpy, safetensors (kept tensors) and blake3
(hash of digests and chain), without this project. Exit code 1 at the first thing that does not
agree, with its place. Rewards are derived where they are `digits`.
"""

import hashlib
import json
import math
import struct
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from blake3 import blake3
from safetensors import deserialize

SAMPLES = ["prompts", "tokens", "rollout_logprobs", "rewards", "advantages", "train_logprobs"]
PROBES = [*SAMPLES, "loss", "grads", "grad_norm", "optimizer", "weights", "sent", "received"]
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F64": "float64"}
MIX_A = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), 31)
MIX_B = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), 33)
agreed = Counter()


def require(what, where, recorded, derived):
    if recorded != derived:
        sys.exit(f"WRONG {what} at {where}: recorded {recorded!r}, derived {derived!r}")
    agreed[what] += 1


def hashed(kind, *parts):
    hasher = blake3(struct.pack("<I", 1))
    for part in (kind.encode(), *parts):
        hasher.update(struct.pack("<Q", len(part)) + part)
    return hasher.hexdigest()[:32]


def tensor_digest(name, dtype, shape, data):
    words = np.frombuffer(data, f"<u{min(len(data) // math.prod(shape), 4)}").astype(np.uint64)
    sums = []
    for *rounds, last in (MIX_A, MIX_B):
        z = (np.arange(words.size, dtype=np.uint64) << np.uint64(32)) | words
        for shift, factor in rounds:
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        sums.append(int((z ^ (z >> np.uint64(last))).sum(dtype=np.uint64)))
    parts = struct.pack(f"<{len(shape)}Q", *shape), struct.pack("<QQ", *sums)
    return hashed("tensor", name.encode(), dtype.encode(), *parts)


def advantages_of(rewards, spec):
    size, loss, found = spec["sampling"]["samples_per_prompt"], spec["loss"], {}  # by index
    groups = [range(i, i + size) for i in range(0, len(rewards), size)]
    groups.sort(key=lambda group: len({rewards[i] for i in group}) == 1)  # stable: varied first
    for group in groups[: spec["data"]["prompts_per_step"]]:
        mean = math.fsum(rewards[i] for i in group) / size
        centred = [rewards[i] - mean for i in group]
        scale = math.sqrt(math.fsum(c * c for c in centred) / max(1, size - 1))
        scale = scale + loss["advantage_eps"] if loss["normalize_std"] else 1.0
        found |= {i: float(np.float32(c / scale)) for i, c in zip(group, centred, strict=True)}
    return found


def check_step(leg, line, digests, where):
    """Sample digests from values; advantages, the gate's figures and rewards from these."""
    path = leg / "rollouts" / f"step-{line['step']:06d}.json"
    values = json.loads((leg / "samples" / path.name).read_text())
    for probe, rows in values.items():
        require("sample names", f"{where} {probe}", sorted(rows), sorted(digests[probe]))
        kind = np.int64 if probe in ("prompts", "tokens") else np.float32
        for key, row in rows.items():
            if kind is np.float32:
                row[:] = [math.nan if v[:3] == "nan" else float.fromhex(v) for v in row]
            array = np.array(row).astype(kind)
            found = tensor_digest(key, array.dtype.name, array.shape, array.tobytes())
            require("sample digests", f"{where} {probe} {key}", digests[probe][key], found)
    rewards, ours, theirs = (values[p] for p in ("rewards", "rollout_logprobs", "train_logprobs"))
    pairs = [(n, a, b) for n in theirs for a, b in zip(ours[n], theirs[n], strict=True)]
    worst, at = max((abs(a - b), n) for n, a, b in pairs)
    exact = sum(a.hex() == b.hex() for _, a, b in pairs) / len(pairs)
    for name, derived in (("logprob_abs_diff/max", worst), ("exact_fraction", exact)):
        recorded = float.fromhex(line["metrics"][f"gate/{name}"])
        require("gate figures", f"{where} {name} ({at})", recorded, derived)
    spec = json.loads((leg / "spec.json").read_text())
    if spec["loss"]["advantage_transform"] == "none":
        derived = advantages_of([row[0] for row in rewards.values()], spec)
        found = values["advantages"]
        for i, n in enumerate(rewards):
            require("advantages", f"{where} {n}", found.get(n, [None])[0], derived.get(i))
    for row in json.loads(path.read_text())["samples"] if path.is_file() else ():
        n = f"{where} {row['request_id']}"
        require("dumped tokens", n, row["token_ids"], values["tokens"][row["request_id"]])
    for row in map(json.loads, (leg / "samples.jsonl").read_text().splitlines()):
        if row["step"] == line["step"] and spec["reward"]["name"] == "digits":
            n, text = row["request_id"], row["completion"].strip()
            share = 0.6 * (sum(c in "0123456789" for c in text) / max(1, len(text)))
            stopped, exact = row["finish_reason"] == "stop", text == row["label"].strip()
            found = float(np.float32(share + 0.2 * stopped + 0.2 * exact))
            require("rewards", f"{where} {n}", rewards[n][0], found)


def check_leg(leg):
    chain, committed, roots = hashlib.sha256(b"lockstep chain 1").hexdigest()[:32], {}, {}
    for line in map(json.loads, (leg / "ledger.jsonl").read_text().splitlines()[1:]):
        if line["kind"] == "commit":
            committed[line["step"]] = line["root"]
            continue
        step, update = line["step"], line["update"]
        name, where = f"step-{step:06d}-{update}", f"{leg.name} step {step} update {update}"
        digests = json.loads((leg / "digests" / f"{name}.json").read_text())
        named = {p: sorted(digests[p].items()) for p in PROBES if p in digests}
        derived = {p: hashed("root", *(t.encode() for nt in named[p] for t in nt)) for p in named}
        for probe in PROBES:
            require("roots", f"{where} {probe}", line["roots"].get(probe), derived.get(probe))
            if probe in derived:
                chain = hashed("chain", chain.encode(), probe.encode(), derived[probe].encode())
        require("chain", where, line["chain"], chain)
        require("sent = received", where, digests.get("received"), digests.get("sent"))
        for path in sorted((leg / "tensors" / name).glob("*.safetensors")):
            for key, part in deserialize(path.read_bytes()):
                found = tensor_digest(key, DTYPES[part["dtype"]], part["shape"], part["data"])
                require(
                    "kept tensors", f"{where} {path.stem} {key}", digests[path.stem][key], found
                )
        if update == 0:
            require("blind commitments", where, committed.get(step), derived["train_logprobs"])
            check_step(leg, line, digests, where)
        roots[step, update] = line["roots"]
    return roots


def main(run):
    legs = {path.parent.name: check_leg(path.parent) for path in sorted(run.glob("*/ledger.jsonl"))}
    first = next(iter(legs.values()), {})
    for other, lines in list(legs.items())[1:]:
        for key in sorted(first.keys() & lines.keys()):
            for probe in PROBES:
                place = f"{other} step {key[0]} update {key[1]} {probe}"
                require("legs", place, lines[key].get(probe), first[key].get(probe))
    if not agreed["gate figures"]:
        sys.exit(f"WRONG folder: {run} has no leg with a step, so nothing was checked")
    print("all agree:", ", ".join(f"{number} {what}" for what, number in agreed.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
