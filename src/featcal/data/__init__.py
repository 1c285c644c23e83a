"""Feature packs and the collection of features."""

from featcal.data.npz import import_npz
from featcal.data.pack import Pack, PackSplit
from featcal.data.write import write_pack

__all__ = ["Pack", "PackSplit", "import_npz", "write_pack"]
