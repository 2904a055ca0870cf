"""The ranks of a run: how many share what, which stage each belongs to, and the communicators that they need.
No torch; memo/parallel/mesh.py puts them on axes."""

from dataclasses import replace

from memo.config import Config
from memo.errors import ConfigError

# for communicators: torch has a pool of 32 of that priority, and a checkpoint's copies take one. Those of
# memo/schedule/streams.py are of the other pool
MOST_COMMUNICATORS = 31
LANES = 2  # communicators of two stages that compute for each other: one for each direction


def degrees(cfg: Config, world: int) -> int:
    """dp. Errors: ConfigError: the layout does not fill the world, or a step's micro batches cannot
    be shared out."""
    ranks = cfg.pp * cfg.cp * cfg.tp  # that share a model
    dp = max(1, world // ranks)
    if dp * ranks != world:
        pp, also = (text * (cfg.pp > 1) for text in (f"pp({cfg.pp})*", "pp, "))
        raise ConfigError(f"{pp}dp({dp})*cp({cfg.cp})*tp({cfg.tp}) != WORLD_SIZE({world}); start it with "
                          f"torchrun --nproc_per_node={ranks} (or a multiple) on one node, or "
                          f"change {also}tp or cp")
    if (given := cfg.micro_batches(dp)) % dp:
        raise ConfigError(f"gradient_accumulation_steps={given} % dp={dp} != 0 (a step's micro batches are "
                          f"dealt to the dp ranks); try auto, or "
                          f"--gradient_accumulation_steps={-(-given // dp) * dp}")
    return dp


def stage_of(cfg: Config, rank: int, world: int) -> Config:
    """The config of one of `world` ranks, of which those of a stage follow each other; unchanged where nobody
    has decided on stages."""
    if cfg.pp == "auto":
        return cfg
    return replace(cfg, stage=rank // (world // cfg.pp))


def communicators(tp: int, cp: int, dp: int, metp: bool = False, pp: int = 1,
                  layers_come: bool = False) -> dict[str, str]:
    """{axis: the axis whose communicator carries its messages} of the axes that have several ranks, but for
    the neighbours of a pipeline (stage_communicators). Each axis has a communicator of its own, for one does
    what it is given in order: METP's matrices go round on another one than is broadcast on, and its keys and
    values on a third; where layers come, their parameters have another one than the sums of gradients. Only
    `world` shares that of another axis with the same ranks: `world` sums scalars, at times when the other
    axis has nothing under way."""
    sizes = dict(tp=tp, hops=tp if metp else 1, cp=cp * tp if metp else cp, data=dp * cp,
                 shards=dp * cp if layers_come else 1, world=pp * dp * cp * tp)
    carriers = {name: name for name, size in sizes.items() if size > 1}
    for name in ("tp", "data"):
        if 1 < sizes[name] == sizes["world"]:
            carriers["world"] = name
    return carriers


def stage_communicators(cfg: Config) -> int:
    """How many a rank has with other stages: with each neighbour one for each direction, and one for the
    gradients of a matrix that the first stage and the last one hold. Those of stages that compute for each
    other are made when it is known who does: LANES with each."""
    neighbours = (not cfg.has_embedding) + (not cfg.has_head)
    return 2 * neighbours + (cfg.ties_stages and (cfg.has_embedding or cfg.has_head))


def n_communicators(cfg: Config, world: int) -> int:
    """How many communicators a rank has, between GPUs."""
    dp = world // (cfg.pp * cfg.cp * cfg.tp)
    mine = set(communicators(cfg.tp, cfg.cp, dp, cfg.metp, cfg.pp, cfg.layers_come).values())
    return len(mine) + stage_communicators(cfg)


def check_streams(cfg: Config, world: int) -> None:
    """Errors: ConfigError: more communicators between GPUs than there are streams for. Two that shared one
    might hold each other up in a circle. With msp each stage may compute for each other one."""
    if not cfg.msp:  # without it a stage has few
        return
    most = LANES * (cfg.pp - 1) + max(n_communicators(replace(cfg, stage=k), world) for k in range(cfg.pp))
    if most > MOST_COMMUNICATORS:
        fits = cfg.pp - -(-(most - MOST_COMMUNICATORS) // LANES)
        raise ConfigError(f"pp={cfg.pp} with msp=True needs {most} communicators on a GPU, there are streams "
                          f"for {MOST_COMMUNICATORS} (each needs one of its own); try pp={fits} or less, or "
                          "leave msp out")
