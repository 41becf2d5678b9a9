"""After Lightning's examples/pytorch/basics: a LightningModule, and a Trainer with strategy="ddp".

As there: the Trainer puts DistributedSampler into the loaders, steps by closures, clips, and evaluates with
sync_dist. Cut: an autoencoder of random numbers. Lightning starts the other ranks itself.
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16))

    def forward(self, inputs):
        return self.decoder(self.encoder(inputs))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[0]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, required=True)
    devices = parser.parse_args().devices
    L.seed_everything(7)
    data = TensorDataset(torch.randn(96, 16))
    train, val = torch.utils.data.random_split(data, [72, 24])
    trainer = L.Trainer(
        **{"accelerator": "cpu", "strategy": "ddp", "devices": devices, "max_epochs": 3},
        **{"gradient_clip_val": 1.0, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(LitAutoEncoder(), DataLoader(train, 6, shuffle=True), DataLoader(val, 6))
