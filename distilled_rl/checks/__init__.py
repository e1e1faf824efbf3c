"""Everything about a run that can be known to be wrong before Ray starts, weights load or verl is imported.

A rule is a generator over the composed configuration that yields one sentence per problem: which key has which value,
why it cannot work, what to do; one that is a :class:`~distilled_rl.checks.values.Remark` is a warning. :func:`check_run`
collects them all. Where verl has a rule of its own the line is cited: here it fails in seconds with a remedy, there it is
an assertion in a worker, minutes later.
"""

from collections.abc import Callable, Iterator

from omegaconf import DictConfig
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from distilled_rl.checks import inputs, notes, settings, sizes, teachers
from distilled_rl.checks.values import Remark
from distilled_rl.config import ConfigError
from distilled_rl.recipe import flatten

# verl leaves this open while no reward model is used.
OPTIONAL_KEYS = ("reward.reward_model.rollout.name",)

Rule = Callable[[DictConfig], Iterator[str]]


def check_run(config: DictConfig) -> list[str]:
    """Check a composed configuration with its data files and model folders; return warnings, one sentence each.

    Raises :class:`ConfigError` with a numbered list of everything that cannot work.
    """
    sentences = list(dict.fromkeys(sentence for rule in RULES for sentence in _outcome(rule, config)))
    problems = [sentence for sentence in sentences if not isinstance(sentence, Remark)]
    if problems:
        lines = (f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise ConfigError("\n".join([f"{len(problems)} problem(s) in the configuration:", *lines]))
    return [*sentences, *notes.notes(config)]


def missing_keys(config: DictConfig) -> Iterator[str]:
    """Mandatory values that neither the recipe nor the command line gave."""
    for key, value in flatten(config).items():
        if value == "???" and key not in OPTIONAL_KEYS:
            yield f"{key} has no value (???): add {key}=VALUE to the command, or set it in the recipe"


def _outcome(rule: Rule, config: DictConfig) -> Iterator[str]:
    """Yield the rule's problems; a rule that needs a value which is missing or cannot be read ends there.

    Missing values are left to :func:`missing_keys`, which names each of them once.
    """
    try:
        yield from rule(config)
    except (MissingMandatoryValue, InterpolationToMissingValueError):
        return
    except ConfigError as error:
        yield str(error)
    except OmegaConfBaseException as error:
        yield str(error).splitlines()[0]


RULES: tuple[Rule, ...] = (
    missing_keys,
    settings.method,
    settings.teacher,
    settings.sampling,
    settings.optimisation,
    settings.skipping,
    inputs.data,
    inputs.models,
    teachers.nodes,
    teachers.pool,
    teachers.routing,
    teachers.comparison,
    teachers.urls,
    sizes.lengths,
    sizes.sync_bucket,
    sizes.pools,
    sizes.batches,
)
