"""Train a small byte-level transformer on three data sets, each in a format of its own, read from S3 through the cache.

    torchrun --standalone --nproc-per-node 2 -m demo.train --data s3://bucket --checkpoints s3://bucket/run ...

Kill it at any moment and start it again with the same line: it goes on from the last checkpoint, bit for bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ckptstore import CheckpointStore, per_rank
from loader import ShardDataset, collate, formats

from .model import ByteTransformer
from .options import Options, parse
from .record import Recorder


def main(options: Options) -> None:
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(dist.get_rank())  # every rank draws its own dropout

    size = options.batch_size
    datasets = [
        ShardDataset(f"{options.data}/wds", batch_size=size, decode={"txt": "bytes"}, ids=True),
        ShardDataset(f"{options.data}/mds", batch_size=size, ids=True),
        ShardDataset(f"{options.data}/tokens", batch_size=size, format=formats.Tokens(options.length), ids=True),
    ]
    loaders = [DataLoader(d, batch_size=size, num_workers=1, collate_fn=collate) for d in datasets]
    model = DistributedDataParallel(ByteTransformer(length=options.crop))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    with CheckpointStore(options.checkpoints) as store, Recorder(options.records, dist.get_rank()) as recorder:
        step = 0
        if store.latest() is not None:
            state = store.load({"model": model, "optimizer": optimizer})  # these two in place, the rest is returned
            step = state["step"]
            torch.set_rng_state(state["rng"])
            for dataset, position in zip(datasets, state["data"], strict=True):
                dataset.load_state_dict(position)

        for epoch in range(step // len(loaders[0]), options.epochs):
            for wds, mds, tokens in zip(*loaders, strict=True):
                text = torch.cat([t[:, : options.crop + 1].long() for t in (wds["txt"], mds["text"], tokens["tokens"])])
                loss = model(text)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                recorder.step(step, epoch, loss.item(), [batch["__id__"] for batch in (wds, mds, tokens)])
                if step % options.save_every == 0:
                    positions = [d.state_after(b) for d, b in zip(datasets, (wds, mds, tokens), strict=True)]
                    rng = per_rank(torch.get_rng_state())
                    state = {"model": model, "optimizer": optimizer, "rng": rng, "step": step, "data": positions}
                    store.save_async(step, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
