"""mmdet: its own RetinaNet or Faster R-CNN config, by MMEngine's Runner; one line changes.

python examples/beside/mmdet_config.py  # or with another of its configs' names
"""

import json
import sys
import tempfile
from pathlib import Path

import mmdet
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from PIL import Image
from torch import Tensor

from memengine import SavedBytes

CONFIGS = Path(mmdet.__file__).parent / '.mim/configs'
CHOSEN = sys.argv[1] if sys.argv[1:] else 'retinanet/retinanet_r18_fpn_1x_coco.py'


def write_coco(folder: Path) -> None:
    """Eight images of noise with a box in each, as COCO lays them out."""
    (folder / 'images').mkdir(exist_ok=True)
    images, boxes = [], []
    for number in range(8):
        noise = torch.randint(256, (128, 128, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray(noise.byte().numpy()).save(folder / f'images/{number}.png')
        images.append(dict(id=number, file_name=f'{number}.png', height=128, width=128))
        box = dict(bbox=[16, 16, 64, 48], area=64 * 48, iscrowd=0)
        boxes.append(dict(id=number + 1, image_id=number, category_id=1, **box))
    said = dict(images=images, annotations=boxes, categories=[dict(id=1, name='person')])
    (folder / 'boxes.json').write_text(json.dumps(said))


def train(**changes: object) -> tuple[dict[str, Tensor], int]:
    """Four iterations: the weights, and the most bytes saved."""
    cfg = Config.fromfile(CONFIGS / CHOSEN)
    cfg.model.backbone.update(init_cfg=None, depth=18)
    cfg.model.neck.in_channels = [64, 128, 256, 512]
    cfg.param_scheduler, cfg.randomness, cfg.log_level = [], dict(seed=0), 'ERROR'
    for key in ('cfg', 'dataloader', 'evaluator'):
        cfg[f'val_{key}'] = cfg[f'test_{key}'] = None
    cfg.train_cfg = dict(by_epoch=True, max_epochs=1)
    cfg.update(changes)
    cfg.visualizer.name = cfg.experiment_name  # which is kept by its name from run to run
    with tempfile.TemporaryDirectory() as folder:
        write_coco(Path(folder))
        pipeline = [dict(it) for it in cfg.train_dataloader.dataset.pipeline]
        next(it for it in pipeline if it['type'] == 'Resize')['scale'] = (128, 128)
        where = dict(data_root=folder, ann_file='boxes.json', data_prefix=dict(img='images/'))
        cfg.train_dataloader.dataset.update(pipeline=pipeline, **where)
        cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
        cfg.work_dir = folder
        runner = Runner.from_cfg(cfg)
        with SavedBytes(runner.model) as saved:
            runner.train()
    return runner.model.state_dict(), saved.peak_bytes


if __name__ == '__main__':
    plain, most = train(experiment_name='plain')
    hooks = [dict(type='memengine.RecomputedActivationsHook')]  # the line that is new
    weights, less = train(experiment_name='recomputed', custom_hooks=hooks)
    print('same weights:', all(torch.equal(plain[name], weights[name]) for name in plain))
    print(f'saved: {most / 2**20:.2f} MiB, recomputed {less / 2**20:.2f} MiB')
