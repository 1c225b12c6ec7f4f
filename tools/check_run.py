"""Check a run folder independently, without this project: `python tools/check_run.py RUN`.

Derives all that it can again from what the run left, with numpy, safetensors (kept tensors) and
blake3 (digests). Exit code 1 at the first thing that does not agree or is missing, with its place.
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
UPDATE = ["loss", "grads", "grad_norm", "optimizer", "weights"]
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F64": "float64"}
MIX_A = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), 31)
MIX_B = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), 33)
agreed = Counter()


def require(what, where, recorded, derived):
    if recorded != derived and (recorded == recorded or derived == derived):  # two NaNs agree
        sys.exit(f"WRONG {what} at {where}: recorded {recorded!r}, derived {derived!r}")
    agreed[what] += 1


def hashed(kind, *parts):
    framed = (struct.pack("<Q", len(part)) + part for part in (kind.encode(), *parts))
    return blake3(struct.pack("<I", 1) + b"".join(framed)).hexdigest()[:32]


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


def number(t):  # a NaN is written with its 64 bits: sign and payload
    return struct.unpack(">d", bytes.fromhex(t[4:]))[0] if t[0] == "n" else float.fromhex(t)


def advantages_of(rewards, spec):
    size, loss, names, found = spec["sampling"]["samples_per_prompt"], spec["loss"], [*rewards], {}
    groups = [names[i : i + size] for i in range(0, len(names), size)]
    groups.sort(key=lambda group: len({rewards[n][0] for n in group}) == 1)  # stable: varied first
    for group in groups[: spec["data"]["prompts_per_step"]]:
        mean = math.fsum(rewards[n][0] for n in group) / size
        centred = {n: rewards[n][0] - mean for n in group}
        scale = math.sqrt(math.fsum(c * c for c in centred.values()) / max(1, size - 1))
        scale = scale + loss["advantage_eps"] if loss["normalize_std"] else 1.0
        found |= {n: [float(np.float32(c / scale))] for n, c in centred.items()}
    return found


def check_step(leg, line, digests, where, spec):
    path = leg / "rollouts" / f"step-{line['step']:06d}.json"
    values = json.loads((leg / "samples" / path.name).read_text())
    for probe in SAMPLES:
        require("names", f"{where} {probe}", sorted(values[probe]), sorted(digests[probe]))
        kind = "int64" if probe in ("prompts", "tokens") else "float32"
        for key, row in values[probe].items():
            row[:] = row if kind == "int64" else map(number, row)
            found = tensor_digest(key, kind, [len(row)], np.array(row).astype(kind).tobytes())
            require("sample digests", f"{where} {probe} {key}", digests[probe][key], found)
    rewards, ours, theirs = (values[p] for p in ("rewards", "rollout_logprobs", "train_logprobs"))
    a, b = np.array([p for n in theirs for p in zip(ours[n], theirs[n], strict=True)]).T.copy()
    equal = np.isfinite(a) & (a.view(np.uint64) == b.view(np.uint64))  # two NaNs are not
    worst, exact = float(np.where(equal, 0, abs(a - b)).max()), float(equal.mean())
    for name, derived in (("gate/logprob_abs_diff/max", worst), ("gate/exact_fraction", exact)):
        require("gate figures", f"{where} {name}", float.fromhex(line["metrics"][name]), derived)
    if spec["loss"]["advantage_transform"] == "none":
        derived, found = advantages_of(rewards, spec), values["advantages"]
        for n in derived | found:
            require("advantages", f"{where} {n}", found.get(n), derived.get(n))
    for row in json.loads(path.read_text())["samples"] if path.is_file() else ():
        n = f"{where} {row['request_id']}"
        require("dumped tokens", n, row["token_ids"], values["tokens"][row["request_id"]])
    rows = map(json.loads, (leg / "samples.jsonl").read_text().splitlines())
    rows = {row["request_id"]: row for row in rows if row["step"] == line["step"]}
    require("names", f"{where} samples.jsonl", sorted(rows), sorted(rewards))
    for n, row in rows.items() if spec["reward"]["name"] == "digits" else ():
        text, is_whole = row["completion"].strip(), row["finish_reason"] == "stop"
        share = 0.6 * (sum(c in "0123456789" for c in text) / max(1, len(text)))
        derived = share + 0.2 * is_whole + 0.2 * (text == row["label"].strip())
        require("rewards", f"{where} {n}", rewards[n], [float(np.float32(derived))])


def check_leg(leg, ended):
    chain, roots = hashlib.sha256(b"lockstep chain 1").hexdigest()[:32], {}
    spec, facts = (json.loads((leg / f"{n}.json").read_text()) for n in ("spec", "environment"))
    pushed = ["sent", "received"] if "rollout" in facts else ["sent"]  # train-only: to nobody
    lines = [json.loads(text) for text in (leg / "ledger.jsonl").read_text().splitlines()]
    committed = {line["step"]: line["root"] for line in lines if line["kind"] == "commit"}
    for line in (line for line in lines if line["kind"] == "update"):
        step, update, last = line["step"], line["update"], spec["loss"]["updates_per_step"] - 1
        name, where = f"step-{step:06d}-{update}", f"{leg.name} step {step} update {update}"
        digests = json.loads((leg / "digests" / f"{name}.json").read_text())
        wanted = SAMPLES * (update == 0) + UPDATE[4 * (update < 0) :]  # line 0: weights alone
        wanted += pushed * (update in (-1, last))
        require("probes", where, [sorted(digests), sorted(line["roots"])], [sorted(wanted)] * 2)
        for probe in wanted:
            named = sorted(digests[probe].items())
            root = hashed("root", *(text.encode() for pair in named for text in pair))
            require("roots", f"{where} {probe}", line["roots"][probe], root)
            chain = hashed("chain", *(text.encode() for text in (chain, probe, root)))
            roots[step, update, probe] = root
        require("chain", where, line["chain"], chain)
        if "received" in wanted:
            require("sent = received", where, digests["received"], digests["sent"])
        for p in sorted((leg / "tensors" / name).glob("*.safetensors")):
            for key, part in deserialize(p.read_bytes()):
                found = tensor_digest(key, DTYPES[part["dtype"]], part["shape"], part["data"])
                require("kept tensors", f"{where} {p.stem} {key}", digests[p.stem][key], found)
        if update == 0:
            require("blind commitments", where, committed.get(step), roots[step, 0, SAMPLES[-1]])
            check_step(leg, line, digests, where, spec)
    # The plan tells the end of a leg of which no verdict does; one that failed has no chain there.
    planned = spec["plan"]["num_steps"], max(roots, default=[None])[0]
    require("ends", leg.name, *((ended["chain_digest"] or chain, chain) if ended else planned))
    return roots


def main(run):
    verdict, there = run / "verdict.json", sorted(p.parent.name for p in run.glob("*/ledger.jsonl"))
    ends = json.loads(verdict.read_text()).get("legs", {}) if verdict.is_file() else {}
    require("ledgers", run, [n for n in ends if ends[n]["chain_digest"] and n not in there], [])
    (_, base), *others = [(n, check_leg(run / n, ends.get(n))) for n in there] or [("", {})]
    for leg, roots in others:
        for key in filter(base.get, roots):  # in causal order
            require("legs", "{} step {} update {} {}".format(leg, *key), roots[key], base[key])
    if not agreed["gate figures"]:
        sys.exit(f"WRONG folder: {run} has no leg with a step, so nothing was checked")
    alone = "" if agreed["legs"] else "; one leg: equality not checked"
    print("all agree:", ", ".join(f"{count} {what}" for what, count in agreed.items()) + alone)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
