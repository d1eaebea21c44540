"""Libraries are wrapped when a program imports them, and not imported for that. This file is also the script of its job."""

import importlib.util
import sys

import torch.distributed as dist

from autotp.layers.when_imported import when_imported
from tests.jobs import run_job


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


def test_parallelize_imports_no_trainer_and_wraps_one_that_comes_later(tmp_path):
    assert "wrapped" in run_job(__file__, cwd=tmp_path, size=1)[0]


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
