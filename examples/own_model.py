import torch
from torch import nn


def build(seed, device, *, width=64, learning_rate=0.05):
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(2048, 20, generator=draw).to(device)
    labels = (points[:, :10].norm(dim=1) > points[:, 10:].norm(dim=1)).long()
    model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2)).to(device)

    def batches():
        while True:
            picked = torch.randint(2048, (128,), generator=draw).to(device)
            yield points[picked], labels[picked]

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model):
        return (model(points).argmax(1) == labels).float().mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    return dict(model=model, optimizer=optimizer, batches=batches(), loss=loss, evaluate=evaluate)
