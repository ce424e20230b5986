"""torchrun as a script, which can be forked where torch has been imported already."""

from torch.distributed.run import main

main()
