"""Feature packs, the files they are made of, and the collection of features."""

from featcal.data.files import import_files, read_files
from featcal.data.pack import Pack, PackSplit, write_pack

__all__ = ["Pack", "PackSplit", "import_files", "read_files", "write_pack"]
