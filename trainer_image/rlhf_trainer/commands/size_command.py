"""Declaration of `rlhf size`; the work is in `size`, whose imports take time that other commands do not need."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_planning.command_line import Program


def declare(program: Program) -> None:
    """Declare the command `rlhf size`."""

    @program.command("rlhf size 32b --algorithm GRPO --response 16k --mean 6k --steps 200 --deadline 48h")
    def size(
        model: Annotated[str, typer.Argument(help="Folder with a config.json, known model, or size such as 7b.")],
        algorithm: Annotated[str, typer.Option(metavar="NAME", help="Algorithm of the training.")] = "GRPO",
        response: Annotated[str, typer.Option(metavar="TOKENS", help="Longest response, such as 16k.")] = "2k",
        mean: Annotated[str, typer.Option(metavar="TOKENS", help="Mean length of responses.")] = "",
        prompt: Annotated[str, typer.Option(metavar="TOKENS", help="Length of prompts.")] = "1k",
        prompts: Annotated[int, typer.Option(min=1, help="Prompts, or rows without RL, of a step.")] = 128,
        samples: Annotated[int | None, typer.Option(min=1, help="Responses to each prompt in RL; default: 8.")] = None,
        lora: Annotated[int, typer.Option(min=0, metavar="RANK", help="Train an adapter of this rank.")] = 0,
        gpus: Annotated[str, typer.Option(metavar="any|TYPE[=NUMBER],...", help="As h100,a100 or h100=16.")] = "any",
        steps: Annotated[int, typer.Option(min=1, help="Steps of the whole job.")] = 200,
        budget: Annotated[float, typer.Option(min=0, metavar="USD", help="Most money for the job.")] = 0.0,
        deadline: Annotated[str, typer.Option(metavar="TIME", help="Most time for the job, such as 48h.")] = "",
        step_time: Annotated[str, typer.Option(metavar="TIME", help="Most time for a step, such as 2min.")] = "",
        prices: Annotated[Path | None, typer.Option(metavar="FILE", help="Your prices, as h100: 2.5.")] = None,
        in_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the manifest.")] = False,
        output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the layout, for others too.")] = None,
        svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw hours against money.")] = None,
        png: Annotated[Path | None, typer.Option(metavar="FILE", help="The same as PNG.")] = None,
        sets: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set a field.")] = None,
    ) -> None:
        """Say what hardware a training needs, with hours and money; no manifest, cluster or network."""
        from rlhf_planning.market import market_of
        from rlhf_planning.sized_job import Training, tokens_of
        from rlhf_trainer.commands.size import limits_of, size_and_print  # numpy: time that `validate` does not need

        lengths = {"response": response, "prompt": prompt, "mean": mean}
        tokens = {name: tokens_of(text, f"--{name}") if text or name != "mean" else 0 for name, text in lengths.items()}
        training = Training(
            algorithm, **tokens, samples=samples or 0, prompts=prompts, lora=lora, steps=steps, sets=sets or ()
        )
        limits, pictures = limits_of(budget, deadline, step_time), [each for each in (svg, png) if each]
        size_and_print(model, training, market_of(prices), gpus, limits, in_json, output, pictures)
