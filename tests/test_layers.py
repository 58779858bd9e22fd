"""Imports point down: what a file may import of this package."""

import ast

import pytest
from conftest import ROOT

LEVELS = [
    {
        "diffusers_patch.ddim_with_logprob",
        "diffusers_patch.equal_halves",
        "lora_forward",
        "benchmarking",
        "prompts",
        "images",
        "named_functions",
        "trajectories",
        "losses",
        "stat_tracking",
        "scorers.devices",
        "scorers.hub",
    },
    {"exits", "diffusers_patch.guidance"},
    {"scoring"},
    {"scorers.clip", "scorers.imagenet", "scorers.ocr", "scorers.bert_score", "scorers.chat", "weighted_sum"},
    {"aesthetic_scorer"},
    {"rewards"},
    {"diffusers_patch.pipeline_with_logprob", "run_plan", "distributed", "tiny_classifier", "metrics", "report"},
    {"policy"},
    {"update", "rollout", "checkpoints", "evaluation"},
    {"rescue"},
    {"launch"},
    {"dry_run"},
]
MODULES = sorted(path for path in (ROOT / "ddpo_pytorch").rglob("*.py") if path.name != "__init__.py")


def name_of(path):
    return ".".join(path.relative_to(ROOT / "ddpo_pytorch").with_suffix("").parts)


def imported(path):
    """Names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def test_every_module_has_a_level():
    assert {name_of(path) for path in MODULES} == set().union(*LEVELS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path):
    level = next(i for i, names in enumerate(LEVELS) if name_of(path) in names)
    below = set().union(*LEVELS[:level])
    own = {name.removeprefix("ddpo_pytorch.") for name in imported(path) if name.startswith("ddpo_pytorch.")}
    assert {name for names in LEVELS for name in names if name in own} <= below


@pytest.mark.parametrize(
    "name, foreign",
    [
        ("losses", {"diffusers", "accelerate", "ml_collections"}),
        ("trajectories", {"diffusers", "accelerate", "ml_collections"}),
        ("run_plan", {"torch", "diffusers", "accelerate", "transformers"}),
        ("prompts", {"torch", "diffusers", "accelerate", "ml_collections"}),
        ("rewards", {"torch", "diffusers", "accelerate", "ml_collections"}),
        ("named_functions", {"torch", "diffusers", "accelerate"}),
        ("exits", {"torch", "diffusers", "accelerate", "ml_collections"}),
        ("scoring", {"diffusers", "accelerate", "ml_collections"}),
        ("scorers.chat", {"torch", "diffusers", "accelerate", "ml_collections"}),
        ("report", {"torch", "diffusers", "accelerate", "ml_collections"}),
        *(
            (name, {"ml_collections"})
            for name in ("policy", "rollout", "update", "checkpoints", "metrics", "evaluation")
        ),
    ],
)
def test_what_a_module_must_not_know_of(name, foreign):
    path = ROOT / "ddpo_pytorch" / f"{name.replace('.', '/')}.py"
    assert not {module.split(".")[0] for module in imported(path) if module} & foreign


SOURCES = [path for folder in ("ddpo_pytorch", "scripts", "config") for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_reads_a_pickle_or_runs_code_from_a_hub(path):
    source = path.read_text()
    foreign = {"pickle", "dill", "joblib", "shelve", "marshal"}
    assert not {module.split(".")[0] for module in imported(path) if module} & foreign
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("weights_only") == "True", ast.unparse(node)
    assert "trust_remote_code" not in source and "allow_pickle" not in source
