"""Files that would run code if they were read carelessly.

Whether something ran is seen by a folder that it makes.
"""

import os
import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, traces):
        self.traces = traces

    def __reduce__(self):
        return os.mkdir, (str(self.traces),)


def torch_file(attack, path):
    """As torch writes it."""
    torch.save({'state_dict': {'net.0.weight': attack}, 'meta': {}}, path)


def old_torch_file(attack, path):
    """As torch wrote it before it wrote archives."""
    torch.save({'meta': attack}, path, _use_new_zipfile_serialization=False)


def bare_pickle(attack, path):
    """No file of torch's at all."""
    path.write_bytes(pickle.dumps(attack))


def text_pickle(attack, path):
    """In pickle's first protocol, which is text."""
    path.write_bytes(pickle.dumps({'state_dict': attack}, protocol=0))


FILES = (torch_file, old_torch_file, bare_pickle, text_pickle)


def write_sharded(folder, state=None):
    """A sharded checkpoint of one tensor, which is all right."""
    state = {'x': torch.ones(2)} if state is None else state
    dcp.save(
        {f'state_dict/{name}': value for name, value in state.items()},
        storage_writer=dcp.FileSystemWriter(folder),
    )
    paths = {f'state_dict/{name}': ('state_dict', name) for name in state}
    torch.save({'state_dict': {}, 'meta': {}, 'tensors': paths}, folder / 'run.pth')


def _rewrite(folder, change):
    file = folder / '.metadata'
    listed = pickle.loads(file.read_bytes())
    change(listed)
    file.write_bytes(pickle.dumps(listed))


def metadata_itself(attack, folder):
    """The list of tensors is the attack."""
    (folder / '.metadata').write_bytes(pickle.dumps(attack))


def metadata_of_a_rank(attack, folder):
    """torch falls back to ``__0.metadata`` when it stumbles over ``.metadata``."""
    _rewrite(folder, lambda listed: setattr(listed, 'storage_meta', (1,)))
    (folder / '__0.metadata').write_bytes(pickle.dumps(attack))


def metadata_in_a_class(attack, folder):
    """It changes the class that a record is of."""
    # the class itself, then what pickle is to set on it
    poison = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'storage_meta'\n"
    (folder / '.metadata').write_bytes(poison + pickle.dumps(attack, 0)[:-1] + b'stb.')


def bytes_for_a_tensor(attack, folder):
    """torch unpickles what is listed as bytes; these pretend to have a tensor's shape."""

    def change(listed):
        ((name, tensor),) = listed.state_dict_metadata.items()
        pretended = metadata.BytesStorageMetadata()
        pretended.__dict__.update(vars(tensor))
        (place,) = listed.storage_data.values()
        torch.save(attack, folder / place.relative_path)
        place.length = (folder / place.relative_path).stat().st_size
        listed.state_dict_metadata = {name: pretended}
        listed.storage_data = {metadata.MetadataIndex(name): place}

    _rewrite(folder, change)


def tensors(attack, folder):
    """The file of tensors."""
    (file,) = folder.glob('*.distcp')
    torch.save(attack, file)
    _rewrite(folder, lambda listed: [_set_length(p, file) for p in listed.storage_data.values()])


def _set_length(place: filesystem._StorageInfo, file: Path):
    place.offset, place.length = 0, file.stat().st_size


def run_file(attack, folder):
    """All but the tensors."""
    torch.save({'meta': attack, 'tensors': {}}, folder / 'run.pth')


def elsewhere(attack, folder):
    """It lists a file outside of the folder."""
    (file,) = folder.glob('*.distcp')
    torch.save(attack, folder.parent / 'elsewhere')

    def change(listed):
        for place in listed.storage_data.values():
            place.relative_path = '../elsewhere'
            _set_length(place, folder.parent / 'elsewhere')

    _rewrite(folder, change)
    file.unlink()


def waiting(attack, folder):
    """Its tensors are to be read from a pipe that nobody writes to."""
    (file,) = folder.glob('*.distcp')
    file.unlink()
    os.mkfifo(file)


FOLDERS = (
    metadata_itself,
    metadata_in_a_class,
    bytes_for_a_tensor,
    metadata_of_a_rank,
    tensors,
    run_file,
    elsewhere,
    waiting,
)
