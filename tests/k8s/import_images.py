"""Gives the nodes of a cluster that is made here the images of an archive on the standard input.

python -m tests.k8s.import_images FOLDER_OF_THE_CLUSTER
"""

import sys
from pathlib import Path

from tests.k8s.nodes import import_images

if __name__ == "__main__":
    import_images(Path(sys.argv[1]))
