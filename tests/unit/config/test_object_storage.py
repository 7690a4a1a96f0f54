"""A drafter in object storage, which vLLM pulls with a package that is not installed here."""

import fnmatch
import shutil
from pathlib import Path

import pytest
from vllm.transformers_utils import runai_utils

from support.pairs import Pair, make_pair
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config.engine_options import EngineOptions

URL = "s3://bucket/drafter"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(Path(tmp_path_factory.mktemp("pair")), mask_embedding=True)


@pytest.fixture
def kept(pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder where vLLM keeps what it pulls."""

    def pull(url: str, folder: str, allow: list[str] | None, ignore: list[str] | None) -> None:
        assert url == f"{URL}/"
        for file in pair.drafter.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow or ()):
                shutil.copy(file, folder)

    monkeypatch.setattr(runai_utils, "runai_pull_files", pull)
    monkeypatch.setattr(runai_utils, "get_cache_dir", lambda: tmp_path)
    return tmp_path


def test_it_is_pulled_and_its_weights_are_left_to_the_loader(pair: Pair, kept: Path) -> None:
    config = pair.start({"model": URL})
    draft = config.speculative_config.draft_model_config
    assert EngineOptions.from_config(config).drafter == pair.spec.model_copy(update={"model": URL})
    assert (draft.model_weights, Path(draft.model).parent.parent) == (URL, kept)
    there = {file.name for file in Path(draft.model).iterdir()}
    assert there == {"config.json", "mask_embedding.pt"}


def test_what_cannot_be_pulled_is_said_by_name(pair: Pair) -> None:
    with pytest.raises(DrafterError, match=rf"^drafter '{URL}': vLLM cannot pull it: .*runai"):
        pair.start({"model": URL})
