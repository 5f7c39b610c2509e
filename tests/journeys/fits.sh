# A batch that is too large: what its step takes, without running it; the gradient cache, by an
# option; and a training of the same losses in a third of the bytes.

few='train_dataloader.num_workers=0 train_dataloader.persistent_workers=False val_dataloader=None
    val_cfg=None val_evaluator=None custom_hooks=[] default_hooks.report=None default_hooks.logger.interval=1
    train_dataloader.batch_size=32'
cache='optim_wrapper.type=GradCacheOptimWrapper optim_wrapper.chunk_size=8'

memengine predict simclr_vit --cfg-options $few $cache | grep 'saved activations'
memengine train simclr_vit --work-dir plain --max-iters 2 --cfg-options $few
memengine train simclr_vit --work-dir cached --max-iters 2 --cfg-options $few $cache
python - <<'END'
import json
from pathlib import Path


def logged(run, name):
    (file,) = Path(run).glob('*/vis_data/scalars.json')
    return [row[name] for row in map(json.loads, file.open()) if name in row]


plain, cached = logged('plain', 'loss'), logged('cached', 'loss')
print(plain, cached)
assert len(plain) == 2
assert all(abs(a - b) < 1e-3 * a for a, b in zip(plain, cached))
assert max(logged('cached', 'saved_mib')) < max(logged('plain', 'saved_mib')) / 3
END
