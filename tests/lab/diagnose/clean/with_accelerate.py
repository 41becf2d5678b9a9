"""After Accelerate's examples/cv_example.py: everything prepared, one-cycle schedule, gather_for_metrics.

As there: the seed is set before the data are split, `prepare` takes model, optimizer, loaders and schedule, and the
schedule counts its steps before that. Cut: a small convolutional network, and pictures of random numbers.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

num_epochs = 3
accelerator = Accelerator(cpu=True)
set_seed(42)
data = TensorDataset(torch.randn(60, 3, 8, 8), torch.randint(4, (60,)))
train_data, eval_data = random_split(data, [48, 12])
train_loader = DataLoader(train_data, shuffle=True, batch_size=4, drop_last=True)
eval_loader = DataLoader(eval_data, shuffle=False, batch_size=4)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
model = nn.Sequential(model, nn.Linear(8, 4)).to(accelerator.device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2 / 25)
schedule = OneCycleLR(optimizer, max_lr=3e-2, epochs=num_epochs, steps_per_epoch=len(train_loader))
model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, schedule
)
for epoch in range(num_epochs):
    model.train()
    for images, targets in train_loader:
        loss = F.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    accurate = counted = 0
    for images, targets in eval_loader:
        with torch.no_grad():
            outputs = model(images)
        predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), targets))
        accurate += (predictions == references).sum().item()
        counted += len(references)
    accelerator.print(f"epoch {epoch}: {accurate / counted:.2%}")
accelerator.end_training()
