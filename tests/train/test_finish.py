"""What a run leaves: each split from its own rows, in its own pixels."""

import pytest
import torch
from tiny import HALF, made_splits, small, trained

from featcal.datasets import Normalisation
from featcal.train.history import Watched
from featcal.train.loop import full_precision, scores_of, write_pack_of, write_run

OTHER = Normalisation((0.4, 0.4, 0.4), (0.2, 0.2, 0.2))


def test_pack_and_scores_have_each_split_in_its_own_pixels(tmp_path):
    splits, model = made_splits(), small().eval()
    parts = {"val": (splits.val, HALF), "test": (splits.test, OTHER)}
    pack = write_pack_of(model, splits, tmp_path, normalise=(HALF, OTHER), network="n", facts={})
    scores = scores_of(model, splits, (HALF, OTHER))
    for name, (images, pixels) in parts.items():
        batches = list(pack.split(name))
        with torch.no_grad():
            logits = model(pixels(images.pixels))
            found = pack.head(torch.cat([batch.features for batch in batches]))
        assert torch.equal(torch.cat([batch.labels for batch in batches]), images.labels)
        torch.testing.assert_close(found, logits)
        assert scores[name] == Watched.of(logits, images.labels).as_json()


def test_pack_and_scores_are_made_without_tf32(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    splits, model, seen = made_splits(), small().eval(), []
    model.head.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    scores_of(model, splits, (HALF, HALF))
    assert seen
    assert not any(seen)
    seen.clear()
    write_pack_of(model, splits, tmp_path, normalise=(HALF, HALF), network="n", facts={})
    assert seen
    assert not any(seen)


def test_folders_may_be_text(tmp_path):
    model, history = trained(folder=str(tmp_path))
    write_run(str(tmp_path), model, history, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run.json"]


@pytest.mark.parametrize("before", [True, False])
def test_full_precision_is_without_tf32_and_puts_it_back(before):
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    kept = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = before
        with full_precision():
            assert [place.allow_tf32 for place in places] == [False, False]
        assert [place.allow_tf32 for place in places] == [before, before]
    finally:
        for place, value in zip(places, kept, strict=True):
            place.allow_tf32 = value
