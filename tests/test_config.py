"""The config tree: every option composes, every mistake is refused with the key at fault and the fix."""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import open_dict

from async_rl import compose, targets
from async_rl.config import ConfigError, RunConfig
from async_rl.config_check import nearest


def composed(*overrides: str) -> RunConfig:
    """What ``python train.py <overrides>`` would run."""
    compose.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(compose.CONF), version_base="1.3"):
        config = hydra_compose("config", list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return compose.check(config, overrides, choices)


def refused(*overrides: str) -> str:
    """The message with which ``python train.py <overrides>`` would be refused."""
    try:
        composed(*overrides)
    except ConfigError as error:
        return str(error)
    except HydraException as error:
        return compose.explain(error, overrides)
    pytest.fail(f"{overrides} was accepted")


EARLY = "rollout.forward_backward_batch"
OPTIONS = sorted(f"{file.parent.name}={file.stem}" for file in compose.CONF.glob("*/*.yaml"))
RECIPES = sorted(compose.recipe_files())


def test_the_base_config_is_the_arithmetic_recipe():
    assert composed() == composed("+recipe=arithmetic")


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_passes_the_check(option):
    yours = {
        "environment=custom": "environment._target_=async_rl.environments.Arithmetic",
        "environment=math": f"environment.path={__file__}",
    }
    composed(option, *filter(None, [yours.get(option)]))


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_whole_on_both_kinds_of_machine_and_with_the_tiny_model(recipe, hardware):
    config = composed(f"+recipe={recipe}", f"hardware={hardware}", "model=tiny")
    assert config.model.name_or_path == "tiny"
    assert config.hardware.accelerator == {"cpu": "cpu", "gpu": "cuda"}[hardware]


def test_one_recipe_holds_the_settings_of_a_cpu_and_of_a_gpu_and_an_override_beats_both():
    gpu = composed("+recipe=gsm8k", "hardware=gpu")
    assert (gpu.batch_size, gpu.group_size, gpu.rollout.sampling.max_tokens) == (32, 8, 512)
    assert gpu.model.name_or_path == "Qwen/Qwen2.5-0.5B-Instruct"
    cpu = composed("+recipe=gsm8k", "hardware=cpu", "max_staleness=1", "rollout.sampling.max_tokens=7")
    assert cpu.batch_size < gpu.batch_size
    assert (cpu.max_staleness, cpu.rollout.sampling.max_tokens) == (1, 7)


TWO = (
    "~environment",
    "+environment.sums={_target_: async_rl.environments.Arithmetic}",
    "+environment.big={_target_: async_rl.environments.Arithmetic, digits: 3}",
)


def test_several_environments_and_their_weights():
    config = composed(*TWO, "rollout.mixture={sums: 3, big: 0.5}")
    assert (list(config.environment), config.rollout.mixture) == (["sums", "big"], {"sums": 3, "big": 0.5})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.mixture={a: 1}"], "rollout.mixture: is for several environments"),
        ([*TWO, "rollout.mixture=3"], "rollout.mixture: 3 is not possible"),
        (
            [*TWO, "rollout.mixture={sums: 1, bug: 1}"],
            "rollout.mixture.bug: there is no environment bug; did you mean rollout.mixture.big? There are sums, big",
        ),
        (
            [*TWO, "rollout.mixture={colour: 1}"],
            "rollout.mixture.colour: there is no environment colour; there are sums, big",
        ),
        (
            [*TWO, "+rollout.mixture.sums=2"],
            "rollout.mixture: has no weight for big; give every environment one, for example {sums: 2, big: 1} "
            "(from the command line: +rollout.mixture.sums=2)",
        ),
        ([*TWO, "rollout.mixture.sums=2"], "a key of rollout.mixture is added with a plus: +rollout.mixture.sums=2"),
        (["run.lightning.max_time=1"], "a key of run.lightning is added with a plus: +run.lightning.max_time=1"),
        ([*TWO, "rollout.mixture={sums: 1, big: 0}"], "rollout.mixture.big: 0 is not possible; give a number > 0"),
        ([*TWO, "rollout.mixture={sums: 1, big: x}"], "rollout.mixture.big: 'x' is not possible"),
        ([*TWO, "rollout.mixture={sums: 1, big: 1}", "rollout.epochs=1"], "with rollout.epochs=1, either"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused(overrides, message):
    assert message in refused(*overrides)


def test_evaluation_samples_as_training_does_unless_told_otherwise():
    sampling = composed(
        "rollout.sampling.max_tokens=9", "run.evaluation.sampling.temperature=0", "run.evaluation.samples=1"
    ).run.evaluation.sampling
    assert (sampling.max_tokens, sampling.temperature) == (9, 0)


@pytest.mark.parametrize(
    ("override", "nearest_name"),
    [
        ("max_stalenes=4", "max_staleness"),
        ("+max_stalenes=4", "max_staleness"),
        ("lr=1e-4", "optimizer.lr"),
        ("+temperature=1", "rollout.sampling.temperature"),
        ("+recip=gsm8k", "recipe"),
        ("modle=tiny", "model"),
        ("rollout.max_retry=1", "rollout.max_retries"),
        ("+environment.digit=2", "environment.digits"),
        ("environment.digit=2", "environment.digits"),
        ("+algorithm.loss.clip_lo=0.1", "algorithm.loss.clip_low"),
        ("+engine.max_num_seq=4", "engine.max_num_seqs"),
        ("+optimizer.weight_dacay=0", "optimizer.weight_decay"),
        ("+optimizer.warmup_step=0", "optimizer.warmup_steps"),
        ("+callbacks.drain.timeout=1", "callbacks.drain.timeout_s"),
        ("+recipe=gsm8", "recipe=gsm8k"),
        ("model=smoll", "model=smollm2"),
        ("engine=vlm", "engine=vllm"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_right_one(override, nearest_name):
    message = refused(override, "engine=vllm") if not override.startswith("engine") else refused(override)
    assert f"did you mean {nearest_name}" in message
    assert override.lstrip("+").partition("=")[0] in message


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("batch_size=0", "a number >= 1"),
        ("batch_size=abc", "a whole number >= 1"),
        ("batch_size=1.5", "a whole number >= 1"),
        ("batch_size=true", "a whole number >= 1"),
        ("batch_size=null", "a whole number >= 1"),
        ("max_staleness=-1", "a number >= 0"),
        ("oversample_factor=inf", "a number >= 1"),
        ("oversample_factor=nan", "a number >= 1"),
        ("stale_policy=hope", "one of wait, mask, allow"),
        ("resume=maybe", "true or false"),
        ("rollout.sampling.top_p=1.5", "a number > 0 and <= 1"),
        ("rollout.sampling.stop=x", "a list of strings, e.g. [x]"),
        ("rollout.max_turns=0", "a number >= 1"),
        ("rollout.max_generated_tokens=0", "a number >= 1"),
        ("rollout.max_context=1", "a number >= 2"),
        ("rollout.template_rewrite=ignore", "one of refuse, split"),
        ("run.max_engine_restarts=-1", "a number >= 0"),
        ("run.stall_timeout_s=0", "a number > 0"),
        ("model.name_or_path=[a]", "a string"),
        ("optimizer.lr=0", "a number > 0"),
        ("optimizer.lr=abc", "a number > 0"),
        ("optimizer.lr_schedule=cosin", "one of constant, linear, cosine"),
        ("environment.digits=0", "a number >= 1 and <= 9"),
        ("environment.digits=two", "a whole number"),
        ("algorithm.loss.clip_low=-1", "a number >= 0 and <= 1"),
        ("algorithm.loss.correction=truncat", "one of truncate, mask, none"),
        ("algorithm.loss.cap=0.5", "a number >= 1"),
    ],
)
def test_an_impossible_value_is_refused_naming_what_is_possible_and_where_it_came_from(override, what):
    message = refused(override)
    assert message.startswith(f"{override.partition('=')[0]}: ")
    assert what in message
    assert f"(from the command line: {override})" in message


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["max_concurrent=4"], "max_concurrent", "at least 8"),
        (["admit_ahead=3"], "admit_ahead", "at most 2"),
        (["oversample_factor=1.5"], "oversample_factor", "lower admit_ahead"),
        (["max_staleness=0", "oversample_factor=2"], "oversample_factor", "raise max_staleness"),
        (["stale_policy=mask"], "stale_policy", "acknowledge_staleness=true"),
        (["stale_policy=allow"], "stale_policy", "acknowledge_staleness=true"),
        (["algorithm.loss.correction=none"], "max_staleness", "algorithm.loss.correction=truncate"),
        (["rollout.group_completion=quorum"], "rollout.min_group_size", "needs it"),
        (["rollout.straggler_timeout_s=3"], "rollout.straggler_timeout_s", "group_completion=quorum"),
        (
            ["rollout.group_completion=quorum", "rollout.straggler_timeout_s=3", "rollout.min_group_size=9"],
            "rollout.min_group_size",
            "at most 8",
        ),
        (["group_size=1"], "group_size", "raise group_size"),
        (
            ["group_size=2", "group_size=1", "rollout.filter_zero_variance=true"],
            "rollout.filter_zero_variance",
            "raise",
        ),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature", "run.evaluation.sampling.temperature"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature", "group_size=8"),
        (
            ["run.evaluation.sampling.temperature=0"],
            "run.evaluation.samples",
            "4 with run.evaluation.sampling.temperature=0",
        ),
        (["rollout.sampling.top_p=0.9"], "rollout.sampling.top_p", "set it to 1"),
        (["rollout.sampling.top_k=20"], "rollout.sampling.top_k", "set it to 0"),
        (["rollout.sampling.min_p=0.1"], "rollout.sampling.min_p", "set it to 0"),
        (["engine=vllm", "rollout.sampling.max_tokens=4096"], "rollout.sampling.max_tokens", "engine.max_model_len"),
        (["rollout.max_context=16"], "rollout.sampling.max_tokens", "raise rollout.max_context"),
        (["engine=vllm", "rollout.max_context=4096"], "rollout.max_context", "engine.max_model_len=2048"),
        (["rollout.max_generated_tokens=15"], "rollout.sampling.max_tokens", "rollout.max_generated_tokens=15"),
        (["rollout.last_batch=train"], "rollout.last_batch", "rollout.epochs"),
        ([f"{EARLY}={{min_tokens: 9}}"], EARLY, "set it to auto, or max_staleness=0"),
        (
            [f"{EARLY}={{min_tokens: 9}}", "max_staleness=0", "stale_policy=mask", "acknowledge_staleness=true"],
            EARLY,
            "stale_policy=wait",
        ),
        ([f"{EARLY}={{min_tokens: 9}}", "max_staleness=0", "algorithm=batch_normalised"], EARLY, "algorithm=grpo"),
        ([f"{EARLY}={{min_tokens: 0}}", "max_staleness=0"], f"{EARLY}.min_tokens", "a number >= 1"),
        ([f"{EARLY}={{min_token: 9}}", "max_staleness=0"], f"{EARLY}.min_token", f"did you mean {EARLY}.min_tokens"),
        ([f"{EARLY}=on", "max_staleness=0"], EARLY, "auto, off"),
        (["algorithm.loss.normalise=constant"], "algorithm.loss.constant", "algorithm.loss.constant=16"),
        (["algorithm.loss.constant=16"], "algorithm.loss.constant", "normalise=constant"),
        (["resume=true", "overwrite=true"], "overwrite", "resume=true"),
        (
            ["+run.lightning.enable_progress_bar=false"],
            "run.lightning.enable_progress_bar",
            "callbacks.progress=null callbacks.summary=null",
        ),
    ],
)
def test_a_contradiction_is_refused_naming_the_key_and_the_fix(overrides, key, fix):
    lines = refused(*overrides).splitlines()
    assert any(line.startswith(f"{key}: ") and fix in line for line in lines), lines


@pytest.mark.parametrize(
    "overrides",
    [
        ["max_staleness=0"],
        ["max_staleness=4", "admit_ahead=2", "oversample_factor=1.5"],
        ["stale_policy=allow", "acknowledge_staleness=true", "admit_ahead=9"],
        ["algorithm.loss.correction=none", "acknowledge_staleness=true"],
        ["algorithm.loss.correction=none", "max_staleness=0"],
        ["rollout.group_completion=quorum", "rollout.min_group_size=6", "rollout.straggler_timeout_s=3"],
        ["group_size=1", "algorithm=batch_normalised", "algorithm.advantage.group_baseline=false"],
        ["run.evaluation.sampling.top_p=0.9"],
        ["run.evaluation.sampling.temperature=0", "run.evaluation.at=never"],
        ["rollout.last_batch=train", "rollout.epochs=1"],
        ["callbacks.progress=null", "logger=jsonl"],
        [f"{EARLY}=off"],
        [f"{EARLY}={{min_sequences: 8}}", "max_staleness=0"],
        ["max_concurrent=8"],
        ["engine=vllm", "rollout.max_turns=4", "rollout.max_generated_tokens=64", "rollout.max_context=2048"],
        ["rollout.template_rewrite=split"],
    ],
)
def test_what_is_possible_is_accepted(overrides):
    composed(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment=null"], "environment=null: a run needs it; give environment= one of arithmetic, calculator"),
        (["engine=null"], "engine=null: a run needs it; give engine= one of auto, transformers"),
        (["model=null"], "A model of your own: model.name_or_path="),
        (["callbacks=null"], "Single ones are left out with callbacks.NAME=null"),
        (["+recipe=null"], "+recipe=null: leave it out"),
        (["~environment"], "Your own: environment=custom environment._target_=my_package.MyEnvironment"),
        (["~engine"], "engine: is missing: what samples; give engine= one of auto"),
        (["environment=custom"], "environment._target_: has no value; give environment._target_=... (conf/"),
        (["environment=custom"], "environment=custom environment._target_=my_package.MyEnvironment"),
        (["environment=math"], "environment.path: has no value; give environment.path=... (conf/environment/math.yaml"),
    ],
)
def test_a_group_without_a_choice_or_a_choice_without_its_value_says_what_to_give(overrides, message):
    try:
        compose.check_choices(overrides)
    except ConfigError as error:
        told = str(error)
    else:
        told = refused(*overrides)
    assert message in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({"recipe": "gsm8k", "environment": "gsm8k"}, "gsm8k"),
        ({"environment": "arithmetic"}, "arithmetic"),
        ({"environment": "custom"}, "none (base config)"),
        ({}, "none (base config)"),
    ],
)
def test_the_recipe_is_named_only_where_it_is_one(choices, name):
    assert compose.recipe_name(choices) == name


def test_all_problems_are_told_at_once():
    message = refused("batch_size=0", "seed=-1", "+colour=red")
    assert {line.partition(":")[0] for line in message.splitlines()} == {"batch_size", "seed", "colour"}


# recipes


def test_recipes_come_from_folders_and_packages_too(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "ours.yaml").write_text("defaults:\n  - override /model: tiny\nbatch_size: 3\n")
    package = tmp_path / "team_recipes_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "theirs.yaml").write_text("max_steps: 5\nrollout:\n  max_retries: -1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(compose.RECIPES_VARIABLE, f"{tmp_path / 'folder'}:team_recipes_package")
    config = composed("+recipe=ours")
    assert (config.batch_size, config.model.name_or_path) == (3, "tiny")
    assert "theirs.yaml" in refused("+recipe=theirs")


@pytest.mark.parametrize("case", ["missing folder", "same name", "broken"])
def test_recipes_that_cannot_be_used_are_named(tmp_path, monkeypatch, case):
    folder = tmp_path / "recipes"
    if case != "missing folder":
        folder.mkdir()
        (folder / ("gsm8k.yaml" if case == "same name" else "broken.yaml")).write_text("a: [1")
    monkeypatch.setenv(compose.RECIPES_VARIABLE, str(folder))
    with pytest.raises(ConfigError) as error:
        compose.register()
    assert str(folder) in str(error.value)


# _target_ nodes

USER_MODULE = """
    from dataclasses import dataclass, field

    from async_rl.environments.base import SingleTurn

    class Shout(SingleTurn):
        def __init__(self, words, loud: bool = True):
            self.words = words

        def prompts(self, split): ...
        def messages(self, prompt): ...
        def reward(self, prompt, completion): ...

    class Typed(Shout):
        def __init__(self, words: list[str], weights: "dict[str, float]" = None): ...

    @dataclass
    class Imported:
        words: "list[str]" = field(default_factory=list)

    class Anything:
        def __init__(self, **kwargs): ...

    class Quiet(Shout): ...

    class Best:
        def __init__(self, every: int = 1, b: str = ""): ...

    def decorate(function):
        return function

    @decorate
    def decorated(a, b=1): ...

    def my_reward(prompt, completion, scale=1.0): ...

    class Half(SingleTurn):
        def prompts(self, split): ...

    class Picky(Anything):
        def __init__(self): ...
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_code_of_test_config.py").write_text(textwrap.dedent(USER_MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    targets._source.cache_clear()
    yield "user_code_of_test_config"
    sys.modules.pop("user_code_of_test_config", None)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("{_target_: MODULE.Shout, words: [a], lod: true}", "environment.lod: there is no such key; did you mean"),
        ("{_target_: MODULE.Shout}", "environment.words: is missing"),
        ("{_target_: MODULE.Shout, words: [a], loud: 3}", "environment.loud: 3 is not possible; give true or false"),
        ("{_target_: MODULE.Quiet, word: [a]}", "did you mean environment.words"),
        ("{_target_: MODULE.decorated, a: 1, c: 2}", "environment.c: there is no such key"),
        ("{_target_: MODULE.Shot, words: [a]}", "did you mean MODULE.Shout"),
        ("{_target_: no_such_module_anywhere.X}", "there is no module no_such_module_anywhere"),
        ("{_target_: 7}", "needs a _target_"),
        (
            "{_target_: async_rl.environments.functional.Task, rows: [], reward: {_target_: MODULE.my_reward, "
            "_partial_: true, scal: 2}}",
            "did you mean environment.reward.scale",
        ),
        ("{one: {_target_: MODULE.Shout, words: [a], lod: 1}}", "environment.one.lod"),
        (
            "{_target_: MODULE.Typed, words: tree}",
            "environment.words: 'tree' is not possible; give a list of strings, e.g. [tree] (from",
        ),
        (
            "{_target_: MODULE.Typed, words: [1, 2]}",
            "environment.words: [1, 2] is not possible; give a list of strings",
        ),
        (
            "{_target_: MODULE.Typed, words: [a], weights: {a: b}}",
            "environment.weights: {'a': 'b'} is not possible; give a section of numbers or null, e.g. {a: 0.5}",
        ),
        ("{_target_: MODULE.Imported, words: 3}", "environment.words: 3 is not possible; give a list of strings"),
    ],
)
def test_keys_of_a_users_target_are_checked_against_its_signature(tmp_path, monkeypatch, user_module, node, message):
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"defaults: [{{override /environment: null}}]\nenvironment: {node.replace('MODULE', user_module)}\n"
    )
    monkeypatch.setenv(compose.RECIPES_VARIABLE, str(tmp_path))
    told = refused("+recipe=mine")
    assert message.replace("MODULE", user_module) in told
    assert "mine.yaml" in told or "is missing" in told


def test_a_users_targets_that_are_right_pass(tmp_path, monkeypatch, user_module):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [{override /environment: null}]\n"
        f"environment: {{_target_: {user_module}.Shout, words: [a]}}\n"
        f"callbacks: {{mine: {{_target_: {user_module}.Anything, whatever: 1}}}}\n"
    )
    monkeypatch.setenv(compose.RECIPES_VARIABLE, str(tmp_path))
    composed("+recipe=mine")


@pytest.mark.parametrize("words", ["[]", "[a, '1']", "{_target_: builtins.list}"])
def test_a_users_lists_that_are_right_pass(tmp_path, monkeypatch, user_module, words):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [{override /environment: null}]\n"
        f"environment: {{_target_: {user_module}.Typed, words: {words}, weights: null}}\n"
    )
    monkeypatch.setenv(compose.RECIPES_VARIABLE, str(tmp_path))
    composed("+recipe=mine")


def test_keys_left_over_from_the_default_environment_come_with_the_way_to_leave_them_out(user_module):
    message = refused(f"environment._target_={user_module}.Shout", "+environment.words=[a]")
    assert "environment.digits: there is no such key" in message
    assert "leave it out with ~environment, or in a recipe" in message
    composed("~environment", f"+environment={{_target_: {user_module}.Shout, words: [a]}}")


def test_the_source_of_our_targets_says_what_their_signature_says():
    names = {line.partition("_target_:")[2].strip() for f in Path(compose.CONF).rglob("*.yaml") for line in f.open()}
    names = {name for name in names if name and not name.startswith("async_rl.engines.vllm")}
    assert len(names) > 10
    for name in sorted(names - {"async_rl.sweep.Sweep", "???"}):
        read = targets._from_source(name)
        found = targets._locate(name)
        assert read is not None, f"the signature of {name} is not read from its source, which costs an import"
        signature = inspect.signature(found).parameters.values()
        named = {p.name for p in signature if p.kind is not p.VAR_KEYWORD and p.kind is not p.VAR_POSITIONAL}
        assert set(read.annotations) == named, name
        assert read.open == any(p.kind is p.VAR_KEYWORD for p in signature)


def test_a_constructor_that_refuses_is_told_once_and_an_abstract_class_says_what_it_lacks(user_module):
    half, error = f"{user_module}.Half", TypeError("Can't instantiate abstract class")
    assert targets.refused_by(half, error) == f"{half} has no method messages and no reward yet; add them"
    assert targets.refused_by(f"{user_module}.Picky", ValueError("n=3")) == f"{user_module}.Picky: n=3"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("batchsize", "batch_size"), ("optimizer.lr", "optimizer.lr"), ("zzz", None), ("sampling.top_p", "rollout.top_p")],
)
def test_nearest(name, expected):
    assert nearest(name, ["batch_size", "optimizer.lr", "rollout.top_p"]) == expected


def test_an_argument_of_a_users_own_component_without_its_plus_is_told_apart_from_a_typo():
    mine = ["environment=custom", "environment._target_=async_rl.environments.calculator.Calculator"]
    assert refused(*mine, "environment.seed=3").endswith("it is added with a plus: +environment.seed=3")
    assert "did you mean +environment.seed=3?" in refused(*mine, "environment.sede=3")
    assert "calculator.Calculator takes eval_size, name, seed, " in refused(*mine, "environment.words=3")
    assert "did you mean environment.digits?" in refused("environment.digitz=3")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.loud=true", "environment holds no loud yet; it is added with a plus: +environment.loud=true"),
        ("environment.lod=true", "there is no key environment.lod; did you mean +environment.loud=true?"),
        ("environment.wrods=[b]", "there is no key environment.wrods; did you mean environment.words?"),
        ("environment.zzz=1", "there is no key environment.zzz; MODULE.Shout takes loud, words"),
        ("callbacks.best.every.x=1", "callbacks.best.every is 2 and has no keys; give callbacks.best.every=..."),
        ("callbacks.best.b=x", "callbacks.best holds no b yet; it is added with a plus: +callbacks.best.b=x"),
        ("callbacks.best.evry=2", "there is no key callbacks.best.evry; did you mean callbacks.best.every?"),
        ("callbacks.bets.every=2", "there is no key callbacks.bets; did you mean callbacks.best.every?"),
        (
            "callbacks.any.x=2",
            "an argument that callbacks.any does not hold yet is added with a plus: +callbacks.any.x=2",
        ),
        ("callbacks.b=null", "there is no key callbacks.b; callbacks has progress, summary, drain, "),
        ("~callbacks.b", "there is no key callbacks.b to leave out; callbacks has progress, summary, drain, "),
        ("~callbacks.bset", "there is no key callbacks.bset to leave out; did you mean ~callbacks.best?"),
        ("callbacks.n._target_=a.B", "a new key of callbacks is added with a plus: +callbacks.n._target_=a.B"),
        ("+callbacks.best.every=3", "callbacks.best.every is there already; change it without the plus: callbacks"),
        ("rollout.temperature=1", "there is no key rollout.temperature; did you mean rollout.sampling.temperature?"),
        ("callback.progress.every=1", "did you mean callbacks.progress.every?"),
        ("rollout.mixture.a=3", "a key of rollout.mixture is added with a plus: +rollout.mixture.a=3"),
        ("run.lightning.x=3", "a key of run.lightning is added with a plus: +run.lightning.x=3"),
        ("run.xyzzy=3", "there is no key run.xyzzy; run has evaluation, checkpoint_every, "),
        ("lr=3", "there is no key lr; did you mean optimizer.lr?"),
    ],
)
def test_a_key_that_hydra_refuses_is_compared_with_its_own_section_of_this_run(
    tmp_path, monkeypatch, user_module, override, message
):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [{override /environment: null}]\n"
        f"environment: {{_target_: {user_module}.Shout, words: [a]}}\n"
        f"callbacks: {{best: {{_target_: {user_module}.Best, every: 2}}, any: {{_target_: {user_module}.Anything}}}}\n"
    )
    monkeypatch.setenv(compose.RECIPES_VARIABLE, str(tmp_path))
    told = refused("+recipe=mine", "max_steps=3", override)
    assert told.startswith(f"{override}: ")
    assert message.replace("MODULE", user_module) in told
    assert len(told.splitlines()) == 1


def test_two_wrong_keys_do_not_hide_what_the_run_has(user_module):
    mine = ["~environment", f"+environment={{_target_: {user_module}.Shout, words: [a]}}"]
    assert "did you mean environment.words?" in refused(*mine, "environment.wrods=[b]", "callbacks.x=3")
