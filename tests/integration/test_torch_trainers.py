"""dataload.torch.DataLoader in the hands of Lightning and Accelerate."""

import itertools
import logging

import pytest
from jobs import require  # tests/support

pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402 - skipped where torch is missing

from dataload.torch import DataLoader  # noqa: E402


class Numbers(data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index


def numbers(batches):
    return [batch[1].tolist() for batch in batches]


@pytest.mark.filterwarnings("ignore")  # Lightning uses what torch deprecates
def test_lightning_puts_its_samplers_in(tmp_path):
    require("pytorch_lightning")
    import pytorch_lightning as lightning
    from pytorch_lightning.utilities.data import _update_dataloader

    class Model(lightning.LightningModule):
        def __init__(self, stop=None):
            super().__init__()
            self.layer, self.seen, self.stop = torch.nn.Linear(2, 1), [], stop

        def training_step(self, batch, step):
            self.seen.append(batch[1].tolist())
            if len(self.seen) == self.stop:
                self.trainer.save_checkpoint(tmp_path / "x.ckpt")
            return self.layer(batch[0]).mean()

        def predict_step(self, batch, step):
            return batch[1]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

        def train_dataloader(self):
            return DataLoader(Numbers(), 2, shuffle=True)

    # What a trainer of two processes does; outside of its hooks it reads the attributes.
    ranks = [data.DistributedSampler(Numbers(), 2, rank, seed=3) for rank in range(2)]
    for sampler in ranks:
        replaced = _update_dataloader(DataLoader(Numbers(), 2, shuffle=True, drop_last=True), sampler)
        assert type(replaced) is DataLoader
        assert numbers(replaced) == numbers(data.DataLoader(Numbers(), 2, sampler=sampler, drop_last=True))

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, **quiet)
    whole = Model(stop=8)
    trainer.fit(whole)
    assert [sorted(itertools.chain(*whole.seen[first : first + 6])) for first in (0, 6)] == [[*range(11)]] * 2
    resumed = Model()
    lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, **quiet).fit(resumed, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.seen == whole.seen[8:]
    predicted = trainer.predict(whole, DataLoader(Numbers(), 5, num_workers=1))
    assert torch.cat(predicted).tolist() == list(range(11))


def test_accelerate_makes_a_loader_of_torch_from_it():
    require("accelerate")
    from accelerate.data_loader import prepare_data_loader

    for rank in range(2):
        for settings in ({"batch_size": 3}, {"batch_size": 2, "drop_last": True}, {"batch_sampler": [[1, 2], [3, 0]]}):
            ours, theirs = (
                prepare_data_loader(loader(Numbers(), **settings), num_processes=2, process_index=rank)
                for loader in (DataLoader, data.DataLoader)
            )
            assert numbers(ours) == numbers(theirs)
    torch.manual_seed(0)
    (ours,) = numbers(prepare_data_loader(DataLoader(Numbers(), 11, shuffle=True)))
    assert sorted(ours) == list(range(11))
    assert ours != sorted(ours)
