"""Workers of a job that merges models; a row of a batch stands for a part of the models, such as a layer."""

from pathlib import Path

from rlhf_api.chain import SCHEME, merged_models
from rlhf_api.spec.merging import Merging
from rlhf_trainer.data.uri import folder_or_name
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL
from rlhf_trainer.training.merging import Merger
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.data import DataShape


class LayerWorker:
    """Worker that replaces the data loader: row 0 stands for all tensors outside the layers, row n for layer n - 1."""

    def __init__(self, setting: WorkerSetting) -> None:
        self._rows = 1 + setting.config().num_hidden_layers

    @register(ONE_TO_ALL)
    def describe(self) -> DataShape:
        """Return the number of rows, each of which is a step."""
        return DataShape(rows=self._rows, total_steps=self._rows, evaluation_rows=0, facts=())

    @register(DP_PROTO, adds=("layer",), phase="data")
    def load_batch(self, batch: Batch) -> Fields:
        """Return the row of a step as `layer`, int64 [1]."""
        return {"layer": batch.rows + batch.step - 1}


class MergeWorker:
    """The worker that merges models, and writes the result's files."""

    def __init__(self, setting: WorkerSetting, *, folder: str) -> None:
        """folder: the merged model's folder, DIR/<job>/model; it appears when the merge is complete."""
        algorithm, self._folder, self._tokenizer = setting.job.spec.algorithm, Path(folder), setting.tokenizer()
        assert isinstance(algorithm, Merging), "other jobs have no such worker"
        jobs = self._folder.parents[1]
        folders = [
            str(jobs / uri.removeprefix(SCHEME) / "model") if uri.startswith(SCHEME) else folder_or_name(uri)
            for uri in merged_models(setting.job).values()
        ]
        self._merger = Merger(algorithm, folders, seed=setting.job.spec.training.seed)

    @register(DP_PROTO, reads=("layer",), phase="merge")
    def merge(self, batch: Batch) -> None:
        """Merge the batch's layer, and after the last one put the model together."""
        place = self._folder.with_name(f"{self._folder.name}.unfinished")
        if self._merger.write(int(batch["layer"]), place):
            self._merger.finish(place, self._folder, self._tokenizer)
