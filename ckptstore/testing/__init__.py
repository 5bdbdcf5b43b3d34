"""What the tests of ckptstore and of its users share: a model object store, a model disk, small checkpoints."""
