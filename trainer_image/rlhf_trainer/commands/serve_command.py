"""Declaration of `rlhf serve`; the work is in `serve`, whose imports take time that other commands do not need."""

from typing import Annotated

import typer

from rlhf_planning.command_line import Program


def declare(program: Program) -> None:
    """Declare the command `rlhf serve`."""

    @program.command("rlhf serve runs/first --port 8000")
    def serve(
        place: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help="Folder of a run, job, or model; or URL.")],
        options: Annotated[
            list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="Options of vLLM's server.")
        ] = None,
        port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8000,
        host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    ) -> None:
        """Serve a trained model by vLLM with OpenAI's API, until Ctrl-C: the last language model of a run."""
        from rlhf_trainer.commands.serve import serve_until_stopped  # torch and transformers: seconds

        serve_until_stopped(place, host=host, port=port, options=options or ())
