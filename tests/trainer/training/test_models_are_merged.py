"""Models are merged as their methods say, layer by layer; OT undoes any order of neurons and heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.merging import MergedModel, Merging
from rlhf_trainer.commands.cli import app
from rlhf_trainer.errors import ConfigError, DataError, TrainerError
from rlhf_trainer.run import chain
from rlhf_trainer.run.deep_check import JobCheck
from rlhf_trainer.run.preconditions import require_other_folders
from rlhf_trainer.training.loading import load_tokenizer
from rlhf_trainer.training.merging import Merger, cuts_of, elected, kept, slerp
from tests.trainer.families import FAMILIES
from tests.trainer.tiny import save_tiny, tiny_config

ALIGNED = (
    *("Llama, tied, with biases", "Qwen3", "Gemma 2", "Phi-3, Phi-4", "OLMo 2", "Starcoder2", "GLM-4", "EXAONE 4"),
    *("Arcee", "GPT-2"),
)
"""Families with all ways in which neurons and heads lie in matrices, biases and norms."""
IDS = torch.arange(3, 43).view(2, 20)


def options(method: str, count: int = 2, *, base: bool = False, **further: Any) -> Merging:
    """Options of a merge; the addresses are not read."""
    models = tuple(MergedModel(uri=f"hf://m/{number}", weight=1.0 + number) for number in range(count))
    return Merging(name="Merge", method=method, models=models, base="hf://m/b" if base else None, **further)  # type: ignore[arg-type]


def merged(folder: Path, chosen: Merging, *models: str, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of the files of a merge."""
    merger, place = Merger(chosen, models, seed=seed), folder.with_name(f"{folder.name}.unfinished")
    count = 0
    while not merger.write(count, place):
        count += 1
    merger.finish(place, folder, load_tokenizer(models[0], trust_remote_code=False, revision=None))
    assert len(list(folder.glob("*.safetensors"))) == count + 1 == 3
    return tensors(folder)


def job_of(*uris: str) -> Job:
    """A job that merges models by OT."""
    algorithm = {"name": "Merge", "method": "OT", "models": [{"uri": uri} for uri in uris]}
    document = {"metadata": {"name": "both"}, "apiVersion": API_VERSION, "kind": KIND, "spec": {"algorithm": algorithm}}
    return load(yaml.safe_dump(document))[0]


def tensors(folder: Path | str) -> dict[str, Tensor]:
    return {name: each for file in sorted(Path(folder).glob("*.safetensors")) for name, each in load_file(file).items()}


def shuffled(model: Any) -> None:
    """Put neurons, groups of heads and the heads in a group into another order, in each layer."""
    cuts, orders = cuts_of(model), dict[str, dict[str, Tensor]]()
    counts = {name: {kind: count for kind, count, _ in cut.blocks} for name, cut in cuts.items()}
    sizes: dict[str, int] = {kind: count for each in counts.values() for kind, count in each.items()}
    for name, parameter in model.named_parameters():
        if name in cuts:
            layer = name.split("layers.")[-1].split("h.")[-1].split(".")[0]
            parameter.data = cuts[name].ordered(parameter.data, orders.setdefault(layer, random_orders(sizes)))


def random_orders(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    groups, size = sizes["k"], sizes["q"] // sizes["k"]
    keys = torch.randperm(groups)
    queries = torch.cat([group * size + torch.randperm(size) for group in keys.tolist()])
    return {"m": torch.randperm(sizes["m"]), "k": keys, "q": queries}


def test_any_order_of_neurons_and_heads_is_found_again(tmp_path: Path) -> None:
    for family in ALIGNED:
        first = save_tiny(tmp_path / family, seed=1, config=FAMILIES[family])
        model = AutoModelForCausalLM.from_pretrained(first)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases that differ by unit
                parameter.add_(0.1 * torch.rand_like(parameter))
            model.save_pretrained(first)
            before = model(IDS).logits
            shuffled(model)
            after = model(IDS).logits
        torch.testing.assert_close(after, before, msg=lambda text: f"{family}: {text}", atol=1e-4, rtol=1e-3)  # noqa: B023
        second = save_tiny(tmp_path / f"{family} in another order", seed=1, config=FAMILIES[family])
        model.save_pretrained(second)
        own, other = tensors(first), tensors(second)
        assert any(not own[name].equal(other[name]) for name in own)
        found = merged(tmp_path / f"{family} merged", options("OT"), first, second)
        assert found.keys() == own.keys()
        for name in own:
            torch.testing.assert_close(found[name], own[name], msg=f"{family}: {name}", atol=1e-6, rtol=1e-6)
    mixed = merged(tmp_path / "mixed", options("Linear"), first, second)
    assert max(float((mixed[name] - own[name]).abs().max()) for name in own) > 0.1
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / f"{family} merged")
    torch.testing.assert_close(whole(IDS).logits, before, atol=1e-4, rtol=1e-3)


def reference(method: str, tensors: Sequence[Tensor], weights: Sequence[float], density: float) -> Tensor:
    """What a method makes, element by element in float64; the base is the last tensor."""
    *models, base = [each.double() for each in tensors]
    if method == "Linear":
        return sum(w * each for w, each in zip(weights, models, strict=True)) / sum(weights)  # type: ignore[return-value]
    if method == "SLERP":
        one, other = models
        share = weights[1] / sum(weights)
        angle = torch.acos((one.flatten() @ other.flatten()) / one.norm() / other.norm())
        return (torch.sin((1 - share) * angle) * one + torch.sin(share * angle) * other) / torch.sin(angle)
    least = [
        (each - base).abs().flatten().sort(descending=True).values[int(density * base.numel()) - 1] for each in models
    ]
    result = base.clone().flatten()
    for element in range(base.numel()):
        changes = [float((each - base).flatten()[element]) for each in models]
        counted = [w * c * (abs(c) >= float(cut)) for w, c, cut in zip(weights, changes, least, strict=True)]
        sign = 1 if sum(counted) >= 0 else -1
        of_sign = [(w, c) for w, c in zip(weights, counted, strict=True) if c * sign > 0]
        result[element] += sum(c for _, c in of_sign) / sum(w for w, _ in of_sign) if of_sign else 0.0
    return result.view(base.shape)


def test_methods_are_their_formulas_in_float64() -> None:
    torch.manual_seed(0)
    parts, weights, density = [torch.randn(7, 5) for _ in range(3)], [1.0, 2.0], 0.4
    one, other, base = parts
    ours = {
        "SLERP": slerp(one, other, 2 / 3),
        "TIES": base
        + elected(torch.stack([kept(each - base, density) for each in (one, other)]), torch.tensor(weights)),
    }
    for method, found in ours.items():
        torch.testing.assert_close(found.double(), reference(method, parts, weights, density), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(slerp(one, 1.001 * one, 0.5), 1.0005 * one, msg="nearly one way: a straight line")
    draw = torch.Generator().manual_seed(3)
    share = [kept(one, 0.25, draw) for _ in range(400)]
    assert all(each.abs().sum() == pytest.approx(float(one.abs().sum()), rel=1e-4) for each in share if each.any())
    assert sum(int((each != 0).sum()) for each in share) / 400 / one.numel() == pytest.approx(0.25, abs=0.02)


def test_a_merge_of_files_follows_the_method(tmp_path: Path) -> None:
    folders = [save_tiny(tmp_path / f"m{seed}", seed=seed) for seed in range(3)]
    one, other, base = map(tensors, folders)
    linear = merged(tmp_path / "linear", options("Linear"), *folders[:2])
    dare = [
        merged(tmp_path / f"dare-{n}", options("DARE", base=True, density=0.5), *folders, seed=n // 2) for n in range(3)
    ]
    for name in one:
        torch.testing.assert_close(
            linear[name], reference("Linear", [one[name], other[name], base[name]], [1.0, 2.0], 1).float()
        )
    assert all(dare[0][name].equal(dare[1][name]) for name in one)
    assert not all(dare[0][name].equal(dare[2][name]) for name in one), "another seed draws others"
    unchanged = merged(tmp_path / "same", options("TIES", base=True, density=0.3), folders[2], folders[2], folders[2])
    assert all(unchanged[name].equal(base[name]) for name in base)


def test_no_more_than_two_layers_of_all_models_are_held(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(
        **{**tiny_config().to_dict(), **wide, "head_dim": None, "rope_parameters": None, "num_hidden_layers": 2}
    )
    folders = [save_tiny(tmp_path / f"m{seed}", seed=seed, config=config) for seed in range(3)]
    layer = 4 * sum(each.numel() for name, each in tensors(folders[0]).items() if "layers.0." in name)
    for chosen in (options("OT", 3), options("TIES", base=True)):
        merger = Merger(chosen, folders, seed=0)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            merger.write(1, tmp_path / chosen.method)
        held, most = 0, 0
        for event in profiler.profiler.kineto_results.events():
            held += event.nbytes() if event.name() == "[memory]" else 0
            most = max(most, held)
        assert layer < most < 2 * 3 * layer, chosen.method


MISTAKES: dict[str, tuple[str, str]] = {
    "missing": ("models.1.uri", "there is no file or folder"),
    "empty": ("models.1.uri", "empty: the folder has no config.json"),
    "adapter": ("models.1.uri", "holds an adapter; `rlhf export CHECKPOINT DIR --merge` makes a model of it"),
    "wider": (
        "models.1.uri",
        "has another shape of model.embed_tokens.weight than the first model: (512, 128), not (512, 64)",
    ),
    "heads": ("models.1.uri", "has another num_attention_heads than the first model"),
    "qwen": ("models.1.uri", "has another family than the first model: qwen2, not llama"),
    "words": ("models.1.uri", "has another vocabulary than the first model"),
    "scorer": ("models.1.uri", "1 tensors are of no language model: score.weight"),
    "mixture": ("models.0.uri", "OT does not know the order of model.layers.0.mlp.experts.gate_up_proj; take another"),
}
"""Folder of a model -> field of spec.algorithm and sentence about it."""


def test_a_model_that_cannot_be_merged_is_one_sentence(tmp_path: Path) -> None:
    right = save_tiny(tmp_path / "right", seed=1)
    save_tiny(
        tmp_path / "wider",
        seed=1,
        config=LlamaConfig(**{**tiny_config().to_dict(), "hidden_size": 128, "head_dim": None}),
    )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    save_tiny(tmp_path / "heads", seed=1, config=LlamaConfig(**{**tiny_config().to_dict(), **heads}))
    save_tiny(tmp_path / "qwen", seed=1, config=FAMILIES["Qwen2"])
    save_tiny(tmp_path / "mixture", seed=1, config=FAMILIES["Qwen3-MoE"])
    save_tiny(tmp_path / "scorer", seed=1, labels=1)
    shutil.copytree(right, tmp_path / "words")
    words = json.loads((tmp_path / "words" / "tokenizer.json").read_text())
    words["added_tokens"][0]["content"] = "<another>"
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for name, (field, sentence) in MISTAKES.items():
        uris = [
            f"file://{tmp_path / name}" if field == f"models.{place}.uri" else f"file://{right}" for place in (0, 1)
        ]
        uris = uris if name != "mixture" else [uris[0]] * 2
        one = job_of(*uris)
        found = JobCheck(one, {"both": one}, tmp_path).problems()
        assert len(found) == 1
        assert str(found[0]).startswith(f"both: spec.algorithm.{field}: "), name
        assert sentence in str(found[0]), name
        assert isinstance(found[0], ConfigError | DataError)


def test_a_value_that_is_not_finite_ends_the_merge(tmp_path: Path) -> None:
    folders = [save_tiny(tmp_path / f"m{seed}", seed=seed) for seed in (1, 2)]
    broken = tensors(folders[1])
    broken["model.norm.weight"][0] = float("nan")
    save_file(broken, Path(folders[1]) / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainerError, match=r"spec.algorithm.models.1.uri: a value of model.norm.weight is not finite"):
        Merger(options("Linear"), folders, seed=0).write(0, tmp_path / "place")


def test_a_merged_value_that_is_not_finite_ends_the_merge(tmp_path: Path) -> None:
    folders = [save_tiny(tmp_path / f"m{seed}", seed=seed) for seed in (1, 2, 3)]
    large = [MergedModel.model_construct(uri=f"hf://m/{number}", weight=1e40) for number in range(2)]
    chosen = options("DARE", base=True, density=1.0).model_copy(update={"models": tuple(large)})
    with pytest.raises(DataError, match=r"spec.algorithm: a merged value of .* is not finite in torch.float32"):
        Merger(chosen, folders, seed=0).write(0, tmp_path / "place")


def test_a_model_in_the_folder_that_the_job_writes_is_refused(tmp_path: Path) -> None:
    job = job_of(f"file://{tmp_path}/both/model", f"file://{tmp_path}/other")
    with pytest.raises(SpecError, match=r"^both: spec.algorithm.models.0.uri: .* is in the folder that the job writes"):
        require_other_folders([job], tmp_path)


def test_the_command_names_its_options_and_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("merge", "a", "b", "--output", str(tmp_path))
    for given, sentence in {
        ("--by=TIES",): "--base: is missing, TIES and DARE need it",
        ("--by=OT", "--base=c"): "--base: is for TIES and DARE only",
        ("job://sft",): 'job://sft: no job of this file, or finished in the run folder, is named "sft"; there is none',
        ("--by=Mean",): '--by: is "Mean" (text), expected Linear, SLERP, TIES, DARE or OT',
        ("--weights=1,-3",): "--weights: is -3.0, expected more than 1e-09",
        ("--weights=1e308,1e308",): "--weights: is 1e+308, expected at most 1000000000",
    }.items():
        done = CliRunner().invoke(app, [*words, *given])
        assert (done.exit_code, done.stderr) == (2, f"error: {sentence}\n")
    monkeypatch.setattr(chain, "run_file", lambda *_, **__: None)
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (0, f"model: {tmp_path}/merge/model\n")

    def refuse(*_: object, **__: object) -> None:
        sentence = "is not what it was when the job began; use another --output, or --restart"
        raise SpecError([Problem("merge: spec.algorithm.models.0.weight", sentence)])

    monkeypatch.setattr(chain, "run_file", refuse)
    done = CliRunner().invoke(app, words)
    assert done.stderr == "error: --weights: is not what it was when the job began; use another --output\n"
