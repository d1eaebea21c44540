"""Libraries are wrapped when a program imports them, and not imported for that. This file is also the script of its process."""

import importlib.util
import os
import subprocess
import sys

import torch.distributed as dist

from autotp.layers.when_imported import when_imported
from tests.jobs import ROOT


def test_follows_an_import_once_however_often_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("late_one", "late_two"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
    finders, seen = list(sys.meta_path), []
    when_imported("late_one", lambda: seen.append(sys.modules["late_one"].value))
    when_imported("late_one", lambda: seen.append("again"))
    when_imported("late_two", lambda: seen.append("two"))
    when_imported("no_such_module", lambda: seen.append("none"))
    assert importlib.util.find_spec("late_one") is not None and importlib.util.find_spec("no_such_module") is None
    assert not seen
    import late_one  # type: ignore[import-not-found]  # noqa: F401

    assert sorted(map(str, seen)) == ["1", "again"]
    when_imported("late_one", lambda: seen.append("there"))
    import late_two  # type: ignore[import-not-found]  # noqa: F401

    assert seen[2:] == ["there", "two"]
    left = [finder for finder in sys.meta_path if finder not in finders]
    assert [finder.name for finder in left] == ["no_such_module"]
    sys.meta_path.remove(left[0])


def test_parallelize_imports_no_trainer_and_wraps_one_that_comes_later():
    # A process of its own: those that tests fork have imported much already.
    alone = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, __file__], env={**os.environ, **alone}, capture_output=True, text=True, timeout=240)
    assert "wrapped" in done.stdout, done.stderr


def main():
    import autotp
    from tests.models import tiny

    libraries = ("transformers.trainer", "datasets", "pandas", "peft", "trl")
    before = [name for name in libraries if name in sys.modules]
    dist.init_process_group("gloo")
    autotp.parallelize(tiny("llama"))
    assert [name for name in libraries if name in sys.modules] == before == []
    from transformers import Trainer

    assert hasattr(Trainer.save_model, "__wrapped__")
    if importlib.util.find_spec("peft") is not None:
        import peft

        assert hasattr(peft.PeftModel.save_pretrained, "__wrapped__")
    dist.destroy_process_group()
    print("wrapped")


if __name__ == "__main__":
    main()
