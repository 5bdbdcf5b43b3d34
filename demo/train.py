"""Train a small byte-level transformer on three data sets, each in a format of its own, read from S3 through the cache.

    torchrun --standalone --nproc-per-node 2 -m demo.train --data s3://bucket --checkpoints s3://bucket/run ...

Kill it at any moment and start it again with the same line: it goes on from the last checkpoint, bit for bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ckptstore import CheckpointStore, RngState
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
        ShardDataset(f"{options.data}/wds", batch_size=size, fields=["txt"], decode="bytes", ids=True),
        ShardDataset(f"{options.data}/mds", batch_size=size, ids=True),
        ShardDataset(f"{options.data}/tokens", batch_size=size, format=formats.Tokens(options.length), ids=True),
    ]
    own = torch.Generator()  # starting workers draws a seed: not from the generator that dropout draws from
    loaders = [DataLoader(d, batch_size=size, num_workers=1, collate_fn=collate, generator=own) for d in datasets]
    model = DistributedDataParallel(ByteTransformer(length=options.crop))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    state = {"model": model, "optimizer": optimizer, "rng": RngState()}

    with CheckpointStore(options.checkpoints) as store, Recorder(options.records, dist.get_rank()) as recorder:
        step = 0
        found = store.resume_or_init(state)  # fills the state in place; None on a first start
        if found is not None:
            step = found["step"]
            for dataset, position in zip(datasets, found["data"], strict=True):
                dataset.load_state_dict(position)

        for epoch in range(datasets[0].epoch, options.epochs):
            for wds, mds, tokens in zip(*loaders, strict=True):
                texts = (wds["txt"], mds["text"], tokens["tokens"])  # uint8, uint8, uint16: (size, length)
                loss = model(torch.cat([text[:, : options.crop + 1].long() for text in texts]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                recorder.step(step, epoch, loss.item(), [batch["__id__"] for batch in (wds, mds, tokens)])
                if step % options.save_every == 0:
                    data = [d.state_after(batch) for d, batch in zip(datasets, (wds, mds, tokens), strict=True)]
                    store.save_async(step, {**state, "step": step, "data": data})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
