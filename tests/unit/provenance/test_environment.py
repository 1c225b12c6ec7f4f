"""Laws of the environment: read back, not assumed; ambient facts are never compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import environment
from engines.environment import (
    DETERMINISM,
    FLASH_ATTENTION_3,
    attention_libraries,
    cpu_facts,
    environment_fingerprint,
    package_versions,
    refuse_flash_attention_3,
    sources_digest,
    telemetry_off_env,
)
from model_specs.errors import UnsupportedError

ROOT = Path(environment.__file__).resolve().parent.parent


def run_python(code: str, **variables: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_an_engine_process_reads_back_what_was_applied_and_which_variables_it_has() -> None:
    code = (
        "import json, sys, engines.environment as e; assert 'torch' not in sys.modules;"
        "e.apply_torch_determinism(1); print(json.dumps(e.read_back()))"
    )
    facts = json.loads(run_python(code, OMP_NUM_THREADS="3", MKL_CBWR="COMPATIBLE"))
    for switch in DETERMINISM:
        assert facts["torch"][switch.name] == switch.wanted
    assert facts["torch"]["threads"] == 1
    assert facts["variables"]["OMP_NUM_THREADS"] == "3"
    assert facts["variables"]["MKL_CBWR"] == "COMPATIBLE"
    assert facts["variables"]["NCCL_ALGO"] == os.environ.get("NCCL_ALGO")
    assert facts["code_digest"] == environment.code_digest()
    assert facts["cpu"]["capability"]
    assert facts["ambient"]["pid"] != os.getpid()


def test_a_switch_that_did_not_take_is_an_error() -> None:
    # As vLLM does in its own process: the number of threads can no longer be set.
    code = (
        "import torch, engines.environment as e\n"
        "torch.set_num_threads(2)\n"
        "torch.set_num_threads = lambda threads: None\n"
        "try:\n"
        "    e.apply_torch_determinism(1)\n"
        "except e.EngineError as error:\n"
        "    print(error)\n"
    )
    assert "threads is 2, not 1" in run_python(code)


def test_the_fingerprint_sees_every_fact_but_ambient_ones() -> None:
    facts = {"torch": {"threads": 1}, "ambient": {"pid": 1}, "nested": [{"ambient": 1, "x": 1}]}
    fingerprint = environment_fingerprint(facts)
    same = {**facts, "ambient": {"pid": 2}, "nested": [{"ambient": 2, "x": 1}]}
    assert environment_fingerprint(same) == fingerprint
    assert environment_fingerprint({**facts, "fingerprint": fingerprint}) == fingerprint
    assert environment_fingerprint({**facts, "torch": {"threads": 2}}) != fingerprint
    assert environment_fingerprint({**facts, "nested": [{"ambient": 1, "x": 2}]}) != fingerprint


def test_the_code_digest_sees_content_names_and_new_files(tmp_path: Path) -> None:
    package = tmp_path / "engines"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    (package / "note.txt").write_text("not code\n")
    digests = [sources_digest(tmp_path, ["engines"])]
    (package / "note.txt").write_text("still not code\n")
    assert sources_digest(tmp_path, ["engines"]) == digests[0]
    (package / "a.py").write_text("x = 2\n")
    digests.append(sources_digest(tmp_path, ["engines"]))
    (package / "a.py").rename(package / "b.py")
    digests.append(sources_digest(tmp_path, ["engines"]))
    (package / "a.py").write_text("")
    digests.append(sources_digest(tmp_path, ["engines"]))
    assert len(set(digests)) == 4


def test_cpu_facts_name_model_and_instruction_sets(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    first = "vendor_id\t: AuthenticAMD\nmodel name\t: EPYC\nflags\t\t: fpu avx2 amx_bf16\n"
    path.write_text(first + "model name\t: other\n")
    facts = cpu_facts(path)
    assert (facts["vendor"], facts["model"]) == ("AuthenticAMD", "EPYC")
    assert facts["flags"] == ["avx2", "amx_bf16"]
    assert cpu_facts(tmp_path / "none")["model"] is None


def test_versions_are_those_installed() -> None:
    import numpy

    versions = package_versions(("numpy", "no-such-distribution"))
    assert versions == {"numpy": numpy.__version__, "no-such-distribution": None}


@pytest.mark.parametrize("module", FLASH_ATTENTION_3)
def test_flash_attention_3_is_stated_and_refused_in_a_trainer(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_flash_attention_3()
    assert attention_libraries()["flash_attention_3"] is None
    (tmp_path / f"{module}.py").write_text("raise AssertionError('it was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attention_libraries()["flash_attention_3"] == module
    with pytest.raises(UnsupportedError, match=f"imported here as {module}"):
        refuse_flash_attention_3()


def test_a_trainers_process_states_its_libraries_and_does_not_start_with_flash_attention_3(
    tmp_path: Path,
) -> None:
    code = (
        "from engines.train.fsdp2.actor import Fsdp2Trainer\n"
        "from model_specs.recipes.tiny_cpu import recipe\n"
        "Fsdp2Trainer(recipe().model_dump_json(), dcp_dir='', rank=0, world_size=1, "
        "rendezvous='')\n"
    )
    (tmp_path / "flash_attn_3").mkdir()
    (tmp_path / "flash_attn_3" / "__init__.py").write_text("")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        run_python(code, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert "UnsupportedError: FlashAttention 3 can be imported here as flash_attn_3" in str(
        refused.value.stderr
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREFECT_SERVER_ANALYTICS_ENABLED", "false"),
        ("DO_NOT_TRACK", "1"),
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ],
)
def test_telemetry_of_every_package_is_switched_off(name: str, value: str) -> None:
    variables = telemetry_off_env()
    assert variables[name] == value
    variables[name] = "changed"
    assert telemetry_off_env()[name] == value
