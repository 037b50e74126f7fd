"""Bundles and adapters: what is written comes back, and nothing else gets in."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaptive_spec.core import POOLED, LengthRule, MatchAcceptance, Rule, Thresholds
from adaptive_spec.errors import ReleaseError
from adaptive_spec.releases.bundle import load_adapter_delta, read_bundle, verify_adapter, write_bundle
from tests.learning.toy import tiny_draft

HASHES = {"target": "a" * 64, "draft": "b" * 64}
CODE = Thresholds(
    1.25,
    0.3,
    5,
    (0.9, 0.8),
    400,
    offset=-0.5,
    sampling_temperature=0.8,
    larger_batches=(LengthRule(2, 0.4, 4), LengthRule(8, 0.0, 0)),
    ngram_acceptance=(MatchAcceptance(2, 1, 9), MatchAcceptance(5, 7, 8)),
)
TABLE = {"code": CODE, POOLED: Thresholds()}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(folder: Path, **options: Any) -> Path:
    torch.manual_seed(3)
    model = get_peft_model(
        tiny_draft(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **options)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def own_adapter(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "adapter"))


@pytest.fixture(scope="module")
def pristine(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    return write_bundle(root, 7, adapter=adapter, thresholds=TABLE, provenance={"hashes": HASHES, "parent": 3})


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))


def test_round_trip(bundle: Path) -> None:
    release = read_bundle(bundle, draft=tiny_draft(), hashes=HASHES)
    assert (release.version, release.parent, dict(release.thresholds)) == (7, 3, TABLE)
    assert release.adapter == str(bundle / "adapter")
    assert sorted(path.name for path in (bundle / "adapter").iterdir()) == [CONFIG, WEIGHTS]


def test_a_bundle_of_thresholds_only(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, 1, adapter=None, thresholds=TABLE, provenance={"hashes": HASHES})
    assert read_bundle(folder, draft=tiny_draft()).adapter is None
    assert [path.name for path in tmp_path.iterdir()] == ["release-000001"]
    with pytest.raises(ReleaseError, match="exists already"):
        write_bundle(tmp_path, 1, adapter=None, thresholds={}, provenance={})


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError):
        write_bundle(tmp_path / "root", 1, adapter=tmp_path / "nowhere", thresholds={}, provenance={})
    with pytest.raises(ReleaseError):
        write_bundle(tmp_path / "root", 1, adapter=None, thresholds={}, provenance={"gain": float("nan")})
    assert list((tmp_path / "root").iterdir()) == []


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_refused(bundle: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(path for path in bundle.rglob("*") if path.is_file())))
    raw = path.read_bytes()
    at = data.draw(st.integers(0, len(raw) - 1))
    flipped = raw[at] ^ (1 << data.draw(st.integers(0, 7)))
    path.write_bytes(raw[:at] + bytes([flipped]) + raw[at + 1 :])
    try:
        with pytest.raises(ReleaseError):
            read_bundle(bundle)
    finally:
        path.write_bytes(raw)


@pytest.mark.parametrize("name", ["manifest.json", "release.json", f"adapter/{WEIGHTS}", f"adapter/{CONFIG}"])
@pytest.mark.parametrize("keep", [None, 0, 0.5, 0.99])
def test_truncated_or_missing_files_are_refused(bundle: Path, name: str, keep: float | None) -> None:
    raw = (bundle / name).read_bytes()
    (bundle / name).unlink()
    if keep is not None:
        (bundle / name).write_bytes(raw[: int(len(raw) * keep)])
    with pytest.raises(ReleaseError):
        read_bundle(bundle)


def test_extra_files_links_and_other_folders_are_refused(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "release-000008")
    with pytest.raises(ReleaseError, match="not the folder"):
        read_bundle(tmp_path / "release-000008")
    (bundle / "adapter" / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ReleaseError, match="damaged"):
        read_bundle(bundle)
    (bundle / "adapter" / "adapter_model.bin").unlink()
    (tmp_path / "weights").write_bytes((bundle / "adapter" / WEIGHTS).read_bytes())
    (bundle / "adapter" / WEIGHTS).unlink()
    (bundle / "adapter" / WEIGHTS).symlink_to(tmp_path / "weights")
    with pytest.raises(ReleaseError, match="plain file"):
        read_bundle(bundle)


def test_other_models_are_refused(bundle: Path) -> None:
    for hashes in ({**HASHES, "draft": "c" * 64}, {"target": "a" * 64}, {}):
        with pytest.raises(ReleaseError, match="other models"):
            read_bundle(bundle, hashes=hashes)


@pytest.mark.parametrize(
    "values",
    [
        Thresholds(temperature=0.0),
        Thresholds(temperature=float("nan")),
        Thresholds(temperature=float("inf")),
        Thresholds(stop_below=1.5),
        Thresholds(stop_below=-0.1),
        Thresholds(max_chain_length=-1),
        Thresholds(max_chain_length=1000),
        Thresholds(survival=(0.5, 1.2)),
        Thresholds(num_observations=-1),
        Thresholds(offset=float("inf")),
        Thresholds(sampling_temperature=0.0),
        Thresholds(larger_batches=(LengthRule(4, 0.5, 2), LengthRule(2, 0.5, 2))),
        Thresholds(larger_batches=(LengthRule(1, 0.5, 2),)),
        Thresholds(larger_batches=(LengthRule(4, 1.5, 2),)),
        Thresholds(ngram_acceptance=(MatchAcceptance(3, 5, 4),)),
        Thresholds(ngram_acceptance=(MatchAcceptance(0, 1, 4),)),
        Thresholds(rule=Rule("vibes")),
        Thresholds(rule=Rule("logits", similarity="hellinger")),
        Thresholds(rule=Rule("logits", min_similarity=float("nan"))),
        Thresholds(rule=Rule("ngram", ngram_size=0)),
        Thresholds(rule=Rule("ngram", min_overlap=1.5)),
        Thresholds(rule=Rule("typical", typical_delta=-1.0)),
    ],
)
def test_thresholds_out_of_range_are_refused_on_both_sides(
    values: Thresholds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ReleaseError, match="out of range"):
        write_bundle(tmp_path, 1, adapter=None, thresholds={"code": values}, provenance={})
    with monkeypatch.context() as patch:  # a writer without checks, and lax JSON
        patch.setattr("adaptive_spec.releases.bundle._checked", lambda _, given: given)
        patch.setattr(
            "adaptive_spec.releases.bundle._json_bytes",
            lambda value: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(),
        )
        folder = write_bundle(tmp_path, 1, adapter=None, thresholds={"code": values}, provenance={})
    with pytest.raises(ReleaseError):
        read_bundle(folder)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[next(iter(tensors))]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 32)


def misshape(tensors: dict[str, Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = torch.zeros(3, tensors[name].shape[1])


def transpose(tensors: dict[str, Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name].T.contiguous()


def put_nan(tensors: dict[str, Tensor]) -> None:
    tensors[next(iter(tensors))][0, 0] = float("nan")


def put_infinity(tensors: dict[str, Tensor]) -> None:
    tensors[next(iter(tensors))][0, 0] = float("inf")


def make_integer(tensors: dict[str, Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name].to(torch.int32)


@pytest.mark.parametrize("damage", [drop, add, misshape, transpose, put_nan, put_infinity, make_integer])
def test_damaged_tensors_are_refused_though_their_hash_is_right(
    damage: Callable[[dict[str, Tensor]], None], own_adapter: Path, tmp_path: Path
) -> None:
    tensors = load_file(own_adapter / WEIGHTS)
    damage(tensors)
    save_file(tensors, own_adapter / WEIGHTS)
    folder = write_bundle(tmp_path / "root", 1, adapter=own_adapter, thresholds={}, provenance={})
    read_bundle(folder)
    with pytest.raises(ReleaseError):
        read_bundle(folder, draft=tiny_draft())
    with pytest.raises(ReleaseError):
        load_adapter_delta(own_adapter, tiny_draft())


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.999])
def test_truncated_adapters_are_refused(own_adapter: Path, share: float) -> None:
    raw = (own_adapter / WEIGHTS).read_bytes()
    (own_adapter / WEIGHTS).write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ReleaseError):
        verify_adapter(own_adapter, tiny_draft())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"target_modules": ["no_such_layer"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"]},
        {"r": 8},
        {"r": 0},
        {"r": "four"},
        {"lora_alpha": "inf"},
        {"lora_alpha": float("nan")},
        {"no_such_field": 1},
        {"target_modules": "(["},
        {"target_modules": None},
        {"rank_pattern": 3},
    ],
)
def test_other_configs_are_refused(own_adapter: Path, change: dict[str, Any]) -> None:
    path = own_adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ReleaseError):
        verify_adapter(own_adapter, tiny_draft())


def test_an_adapter_of_another_draft_is_refused(own_adapter: Path) -> None:
    draft = tiny_draft()
    draft.config.num_hidden_layers = 3
    with pytest.raises(ReleaseError, match="lacks the tensors"):
        verify_adapter(own_adapter, type(draft)(draft.config))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}])
def test_merged_deltas_give_the_logits_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, **options)
    reference = PeftModel.from_pretrained(tiny_draft(), str(folder)).eval()
    draft = tiny_draft()
    deltas = load_adapter_delta(folder, draft)
    parameters = dict(draft.named_parameters())
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        bare = draft(ids).logits
        for name, delta in deltas.items():
            assert delta.dtype == torch.float32 and delta.shape == parameters[name].shape
            parameters[name] += delta
        merged = draft(ids).logits
        torch.testing.assert_close(merged, reference(ids).logits, atol=1e-5, rtol=1e-4)
    assert (merged - bare).abs().max() > 1e-3


def test_vocabulary_and_adapters_of_domains_are_kept(tmp_path: Path, adapter: Path) -> None:
    draft = tiny_draft()
    folder = write_bundle(
        tmp_path,
        1,
        adapter=adapter,
        thresholds={},
        provenance={},
        vocabulary=[1, 4, 9],
        domain_adapters={"sql": adapter, "a/b": adapter},
    )
    release = read_bundle(folder, draft=draft)
    assert release.vocabulary == (1, 4, 9)
    assert sorted(release.domain_adapters) == ["a/b", "sql"]
    assert (
        load_adapter_delta(Path(release.domain_adapters["sql"]), draft).keys()
        == load_adapter_delta(Path(str(release.adapter)), draft).keys()
    )
    (folder / "adapters" / "1" / "adapter_config.json").unlink()
    with pytest.raises(ReleaseError, match="damaged"):
        read_bundle(folder)
    for bad in ([], [3, 3], [4, 2], [-1, 2]):
        with pytest.raises(ReleaseError, match="ascending"):
            write_bundle(tmp_path, 2, adapter=None, thresholds={}, provenance={}, vocabulary=bad)


def test_bundles_of_the_first_format_are_still_read(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, 1, adapter=None, thresholds={}, provenance={"parent": 0})
    described = json.loads((folder / "release.json").read_text())
    old = {name: described[name] for name in ("version", "thresholds", "provenance")}
    (folder / "release.json").write_text(json.dumps(old, indent=2, sort_keys=True) + "\n")
    digest = hashlib.sha256((folder / "release.json").read_bytes()).hexdigest()
    manifest = {"format": 1, "version": 1, "files": {"release.json": digest}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    release = read_bundle(folder)
    assert (release.vocabulary, dict(release.domain_adapters), release.parent) == (None, {}, 0)


def test_rules_of_domains_are_kept(tmp_path: Path) -> None:
    rule = Rule("hybrid", ngram_size=3, min_overlap=0.25, similarity="js", min_similarity=0.875)
    thresholds = {"code": Thresholds(rule=rule), "prose": Thresholds()}
    folder = write_bundle(tmp_path, 1, adapter=None, thresholds=thresholds, provenance={})
    assert dict(read_bundle(folder).thresholds) == thresholds
