"""The losses that docs/veomni.md promises: those of VeOmni's generated modules, whose slots are bound to eager code.

Arguments: the device, and the folders to run. Prints what `page` prints, by folder, as one line of JSON.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.veomni.page import losses
from tests.veomni.sides import bound, prepare, side
from tests.veomni.standins import stand_ins
from tests.veomni.unable import UNABLE


def main() -> None:
    torch.set_num_threads(1)
    device, *folders = sys.argv[1:]
    prepare()
    found = {}
    for folder in folders:
        unable = UNABLE.get((folder, device))
        with stand_ins(unable.package if unable else ""):
            module = side(folder, device)
            assert bound(module)
            found[folder] = losses(module, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
