"""torchmetrics metrics in evaluations, on predictions or answers, are equal on one process and on two ranks."""

import importlib.util
import math
from pathlib import Path

import pytest
from support.composition import configure
from support.harness import run_ranks
from support.tiny import SMALL_LM
from support.toy import FP32

from foundry.config.record.recorded import foreign_parts
from foundry.core.errors import ConfigError

HELD_OUT = "evaluation.evaluators.held_out"
has_torchmetrics = pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="no torchmetrics")


class Classes:
    """Cross-entropy of three classes."""

    metrics = ()

    def num_valid(self, microbatch):
        return int((microbatch["position"] >= 0).sum())

    def loss(self, model, microbatch):
        from torch.nn.functional import cross_entropy

        from foundry.core.protocols import LossSum

        return LossSum(cross_entropy(*self.predict(model, microbatch), reduction="sum"))

    def predict(self, model, microbatch):
        real = microbatch["position"] >= 0
        return model(microbatch["x"])[real], microbatch["y"][real]


def rows(count):
    import torch

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)
    return [{"x": x[index], "y": y[index]} for index in range(count)]


def measure(world, count, wanted=("accuracy", "auroc", "classes")):
    """Return the metrics of `count` samples, evaluated in batches of two on each rank."""
    import torch
    from support.contexts import run_context
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    from foundry.config.schemas.distributed import DDP
    from foundry.data.splits import DataSplits
    from foundry.evaluators.held_out import HeldOut
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize
    from foundry.training.evaluation import Evaluation

    torch.manual_seed(0)
    world = arrange(world, DDP())
    parallel = parallelize(torch.nn.Linear(4, 3), FP32, world, grad_checkpointing=False, torchcompile=False)
    metrics = {
        "accuracy": MulticlassAccuracy(3, average="micro"),  # State: sums.
        "auroc": MulticlassAUROC(3),  # State: lists of all predictions.
        "classes": MulticlassAccuracy(3, average="none"),  # Three values.
    }
    data = DataSplits(train=[], validation=rows(count), fingerprint="")
    evaluator = HeldOut(
        objective=Classes(),
        data=data,
        per_gpu_batch_size=2,
        torchmetrics={name: metrics[name] for name in wanted},
    )
    evaluation = Evaluation(
        model=parallel.model, evaluators={"held_out": evaluator}, run=run_context(world=world), folder=Path()
    )
    first, _ = evaluation.measure(1, lambda what: None)
    assert evaluation.measure(2, lambda what: None)[0] == first, "nothing is left of an earlier evaluation"
    return first


@has_torchmetrics
@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("count", [11, 2])  # Two samples are one batch, on the first rank.
def test_torchmetrics_on_two_ranks_match_one_process(count):
    import torch
    from sklearn.metrics import roc_auc_score

    from foundry.parallel.process_group import World

    alone = measure(World.single(torch.device("cpu")), count)
    torch.manual_seed(0)
    held_out = rows(count)
    x, y = (torch.stack([row[key] for row in held_out]) for key in ("x", "y"))
    scores = torch.nn.Linear(4, 3)(x).detach()
    right = scores.argmax(-1) == y
    assert alone["val_accuracy"] == pytest.approx(right.double().mean().item())
    assert alone["val_classes_2"] == pytest.approx(right[y == 2].double().mean().item() if (y == 2).any() else 0)
    if count == 11:
        area = roc_auc_score(y, scores.softmax(-1), multi_class="ovr", average="macro")
        assert alone["val_auroc"] == pytest.approx(area, rel=1e-5)
    for measured in run_ranks(measure, 2, count):
        assert measured == pytest.approx(alone, rel=1e-6)


@has_torchmetrics
def test_torchmetrics_perplexity_is_exp_of_the_loss():
    import torch
    from torchmetrics.text import Perplexity

    from foundry.evaluators.torch_metrics import TorchMetrics
    from foundry.models.transformer import Transformer
    from foundry.objectives.next_token import NextToken
    from foundry.parallel.process_group import World

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    model = Transformer(vocab_size=20, max_seq_len=8, init_std=0.3, **sizes).eval()
    tokens, targets = torch.randint(20, (2, 3, 8))
    targets[0, :5] = -100
    microbatch = {"tokens": tokens, "targets": targets, "position": torch.tensor([0, 1, -1])}
    objective, metrics = NextToken(), TorchMetrics({"ppl": Perplexity()}, "here")
    metrics.start(torch.device("cpu"))
    world = World.single(torch.device("cpu"))
    with torch.no_grad():
        metrics.add(*objective.predict(model, microbatch))
        loss = objective.loss(model, microbatch).loss.item() / objective.num_valid(microbatch)
    assert metrics.measure(world) == {"ppl": pytest.approx(math.exp(loss), rel=1e-5)}
    metrics.start(torch.device("cpu"))
    metrics.add(torch.zeros(0, 20), torch.zeros(0, dtype=torch.int64))
    assert metrics.measure(world) == {}, "of nothing"


@has_torchmetrics
def test_text_metrics_get_one_reference_per_text():
    from torchmetrics.text import BLEUScore, ROUGEScore, TranslationEditRate, WordErrorRate

    from foundry.evaluators.torch_metrics import TorchMetrics

    metrics = {
        "bleu": BLEUScore(n_gram=1),
        "ter": TranslationEditRate(),
        "wer": WordErrorRate(),
        "rouge": ROUGEScore(rouge_keys="rougeL"),
    }
    found = TorchMetrics(metrics, "here").measure_texts(["the dog runs", "a cat"], ["the dog ran", "a cat"])
    assert found["bleu"] == pytest.approx(4 / 5)
    assert found["ter"] == found["wer"] == pytest.approx(1 / 5)
    assert found["rougeL_fmeasure"] == pytest.approx((2 / 3 + 1) / 2)
    assert TorchMetrics(metrics, "here").measure_texts([], []) == {}


def measure_answers(world):
    import torch
    from support.contexts import evaluation_context
    from test_exact_match_ranks import built
    from torchmetrics.text import CharErrorRate, ROUGEScore

    from foundry.evaluators.exact_match import ExactMatch

    model, data = built()
    metrics = {"cer": CharErrorRate(), "rouge": ROUGEScore(rouge_keys="rouge1")}
    evaluator = ExactMatch(data=data, max_new_tokens=8, per_gpu_batch_size=2, torchmetrics=metrics)
    context = evaluation_context(world=world)
    with torch.no_grad():
        return [evaluator.evaluate(model.eval(), context) for _ in range(2)]


@has_torchmetrics
@pytest.mark.long
@pytest.mark.distributed
def test_answer_metrics_are_identical_on_any_number_of_ranks():
    import torch

    from foundry.parallel.process_group import World

    first, again = measure_answers(World.single(torch.device("cpu")))
    assert first == again
    assert first["exact_match"] == 5 / 7
    assert 0 < first["cer"] < 1
    assert set(first) > {"rouge1_fmeasure", "rouge1_precision", "rouge1_recall"}
    for of_rank in run_ranks(measure_answers, 2):
        assert of_rank == [first, first]


@has_torchmetrics
def test_invalid_torchmetrics_settings_are_config_errors():
    from torchmetrics.classification import MulticlassAccuracy

    from foundry.core.protocols import Objective
    from foundry.data.splits import DataSplits
    from foundry.evaluators.held_out import HeldOut

    class Mute(Objective):
        metrics = ()
        num_valid = loss = None

    common = {"data": DataSplits(train=[], validation=[], fingerprint=""), "per_gpu_batch_size": 2}
    with pytest.raises(ConfigError, match=rf"^{HELD_OUT}.torchmetrics: is given but objective Mute has no predict\(\)"):
        HeldOut(objective=Mute(), **common, torchmetrics={"accuracy": MulticlassAccuracy(3)})
    with pytest.raises(ConfigError, match=rf"^{HELD_OUT}.torchmetrics.accuracy: is int, which is not a torchmetrics"):
        HeldOut(objective=Classes(), **common, torchmetrics={"accuracy": 3})


def test_missing_torchmetrics_package_is_a_config_error(monkeypatch):
    monkeypatch.setattr("foundry.config.schemas.evaluation.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"{HELD_OUT}.torchmetrics: needs torchmetrics, .* pip install '?torchmetrics"
    ):
        configure(*SMALL_LM, f"+{HELD_OUT}.torchmetrics.ppl._target_=torchmetrics.text.Perplexity")


@has_torchmetrics
def test_misspelled_torchmetrics_target_is_refused_by_compose():
    with pytest.raises(ConfigError, match=r"ppl._target_: is torchmetrics.text.Perplexit .* did you mean Perplexity\?"):
        configure(*SMALL_LM, f"+{HELD_OUT}.torchmetrics.ppl._target_=torchmetrics.text.Perplexit")
    configure(*SMALL_LM, f"+{HELD_OUT}.torchmetrics.ppl._target_=torchmetrics.text.Perplexity")


@pytest.mark.parametrize(
    ("target", "is_own"),
    [
        ("torchmetrics.text.BLEUScore", True),
        ("torchmetrics.classification.MulticlassAccuracy", True),
        ("torchmetrics.regression.MeanSquaredError", True),
        ("torchmetrics.text.BERTScore", False),  # Loads a model from a user-given path.
        ("torchmetrics.text.bert.os.system", False),
        ("torchmetrics.text.os.System", False),
        ("torchmetrics.utilities.checks.perf_counter", False),
        ("mine.Metric", False),
    ],
)
def test_torchmetrics_targets_in_a_recorded_config_need_no_trust(target, is_own):
    node = {"_target_": "foundry.evals.HeldOut", "torchmetrics": {"own": {"_target_": target}}}
    found = list(foreign_parts({"evaluation": {"evaluators": {"held_out": node}}}))
    assert found == ([] if is_own else [f"{HELD_OUT}.torchmetrics.own._target_={target}"])
    nested = {"evaluation": {"evaluators": {"x": {"_target_": node["_target_"], "other": {"_target_": target}}}}}
    assert list(foreign_parts(nested)), "anywhere else it does"
