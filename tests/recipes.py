"""The recipes in small: data and weights in the layouts that they read, made in a moment.

Everything is written below ``data`` in the current folder, where the recipes look for it.
"""

import json
from pathlib import Path

import numpy as np
import timm
import torch
import torchvision
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.datasets.toy import write_cifar

DEIT_TINY, *CIFAR, FASTER_RCNN, MASK_RCNN, GPT2 = RECIPES = (
    'configs/deit/deit_vit-tiny-p16_8xb128-300e_imagenet.py',
    'configs/deit/deit_vit-small-p16_2xb384-1000e_cifar100.py',
    'configs/deit/deit_vit-base-p16_2xb384-1000e_cifar100.py',
    'configs/deit/deit_vit-small-p16_2xb384-1000e_cifar100_dropit-gact.py',
    'configs/deit/deit_vit-small-p16_2xb384-1000e_cifar100_dropit-mesa.py',
    'configs/detection/faster-rcnn_resnet50-fpn_8xb2-26e_coco.py',
    'configs/detection/mask-rcnn_resnet50-fpn_8xb2-26e_coco.py',
    'configs/gpt2/gpt2_1xb8-3e_text.py',
)
VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
COLOURS = np.array([(220, 40, 40), (40, 200, 60), (50, 70, 230), (230, 220, 50), (200, 60, 210)])


# ------------------------------------------------------------------ data


def noisy(colour, size, generator):
    """An image [size, size, 3] of about one colour."""
    pixels = colour + generator.normal(0, 25, (size, size, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def write_imagenet(folder, per_class=24):
    """Four classes, each of a colour."""
    generator = np.random.default_rng(0)
    for split in ('train', 'val'):
        for name, colour in zip(('n01', 'n02', 'n03', 'n04'), COLOURS, strict=False):
            (folder / split / name).mkdir(parents=True)
            for index in range(per_class):
                image = Image.fromarray(noisy(colour, 40, generator))
                image.save(folder / split / name / f'{index}.png')


def write_colourful_cifar(folder, monkeypatch, count=100):
    """CIFAR-100's files with ten classes: one of five colours, plain or with stripes."""
    generator = np.random.default_rng(0)

    def paint(label):
        image = noisy(COLOURS[label // 2], 32, generator)
        if label % 2:
            image[np.arange(32) // 4 % 2 == 0] //= 4
        return image

    write_cifar(folder, monkeypatch, 'CIFAR100', count, paint)


def write_coco(folder, count=16, size=64):
    """Images of a red rectangle (category 1) and a green disc (category 3) on grey."""
    generator = np.random.default_rng(0)
    (folder / 'annotations').mkdir(parents=True)
    for split in ('train2017', 'val2017'):
        (folder / split).mkdir()
        images, annotations = [], []
        for image_id in range(10, 10 + count):
            pixels = generator.integers(90, 150, (size, size, 3), dtype=np.uint8)
            for side, category in enumerate((1, 3)):  # rectangle left, disc right
                width, height = generator.integers(14, 26, 2) if category == 1 else [22, 22]
                x = int(generator.integers(2, 30 - width)) + side * size // 2
                y = int(generator.integers(2, size - height - 2))
                box = [x, y, int(width), int(height)]
                outline = _rectangle(*box) if category == 1 else _disc(*box)
                inside = _inside(outline, size)
                pixels[inside] = (210, 40, 40) if category == 1 else (40, 190, 60)
                annotations.append(
                    dict(
                        id=len(annotations) + 1,
                        image_id=image_id,
                        category_id=category,
                        bbox=box,
                        area=int(inside.sum()),
                        iscrowd=0,
                        segmentation=[outline],
                    )
                )
            name = f'{image_id:012}.png'
            Image.fromarray(pixels).save(folder / split / name)
            images.append(dict(id=image_id, file_name=name, width=size, height=size))
        categories = [dict(id=1, name='rectangle'), dict(id=3, name='disc')]
        text = json.dumps(dict(images=images, annotations=annotations, categories=categories))
        (folder / 'annotations' / f'instances_{split}.json').write_text(text)


def _rectangle(x, y, width, height):
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def _disc(x, y, width, height):
    angles = np.linspace(0, 2 * np.pi, 32, endpoint=False)
    across = x + width / 2 * (1 + np.cos(angles))
    down = y + height / 2 * (1 + np.sin(angles))
    return np.stack([across, down], axis=1).flatten().tolist()


def _inside(outline, size):
    from PIL import ImageDraw

    mask = Image.new('1', (size, size))
    ImageDraw.Draw(mask).polygon(list(zip(outline[::2], outline[1::2], strict=True)), fill=1)
    return np.asarray(mask)


def write_text(folder):
    """Sentences of a few words in random order, others for validation."""
    generator = np.random.default_rng(0)
    words = ['red', 'green', 'blue']
    folder.mkdir(parents=True)
    for split, count in (('train', 400), ('val', 60)):
        lines = [
            f'the {first} bird sings and the {second} bird listens.'
            for first, second in generator.choice(words, (count, 2))
        ]
        (folder / f'{split}.txt').write_text('\n'.join(lines), encoding='utf-8')


# ------------------------------------------------------------------ weights


def write_deit(file, model_name):
    """A checkpoint as DeiT's authors offer it: weights with a classifier, under ``model``."""
    torch.manual_seed(1)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({'model': timm.create_model(model_name, **VIT).state_dict()}, file)


def write_resnet(file):
    """A checkpoint as torchvision offers it, of a ResNet-18 whose BatchNorm has seen images."""
    torch.manual_seed(1)
    file.parent.mkdir(parents=True, exist_ok=True)
    resnet = torchvision.models.resnet18().train()
    for module in resnet.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # all that is seen counts alike
    with torch.no_grad():
        for _ in range(4):
            resnet(torch.randn(4, 3, 64, 64))
    torch.save(resnet.state_dict(), file)


def write_gpt2(folder, text):
    """A model and its tokenizer, as transformers saves them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=['<|endoftext|>'],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token='<|endoftext|>'
    )
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    settings = transformers.GPT2Config(
        vocab_size=280,
        n_positions=32,
        n_embd=48,
        n_layer=2,
        n_head=3,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(settings).save_pretrained(folder)


# ------------------------------------------------------------------ a recipe in small


def provide(name, monkeypatch):
    """Write what a recipe reads below ``data``."""
    data = Path('data')
    if name == DEIT_TINY:
        write_imagenet(data / 'imagenet')
    elif name == GPT2:
        write_text(data / 'text')
        write_gpt2(data / 'pretrained' / 'gpt2', data / 'text' / 'train.txt')
    elif name in CIFAR:
        data.mkdir()
        write_colourful_cifar(data, monkeypatch)
        for size, digest in (('small', 'cd65a155'), ('base', 'b5f2ef4d')):
            model = f'deit_{size}_patch16_224'
            write_deit(data / 'pretrained' / f'{model}-{digest}.pth', model)
    else:
        write_coco(data / 'coco')
        write_resnet(data / 'pretrained' / 'resnet50-0676ba61.pth')


def shrink_model(name, cfg):
    """The recipe's network in small, and pictures or texts of the size that it takes."""
    if name == GPT2:
        for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
            loader.dataset.block_size = 32
    elif name in (FASTER_RCNN, MASK_RCNN):
        cfg.model.update(
            backbone='resnet18',
            min_size=64,
            max_size=64,
            rpn_pre_nms_top_n_train=200,
            rpn_post_nms_top_n_train=50,
            rpn_pre_nms_top_n_test=200,
            rpn_post_nms_top_n_test=30,
            box_batch_size_per_image=32,
        )
    else:
        cfg.model.backbone.update(VIT)
        for step in cfg.train_dataloader.dataset.pipeline:
            if step.type == 'torchvision/RandomResizedCrop':
                step.size = 32
            if step.type == 'TimmRandAugment':
                step.image_size = 32
        for loader in (cfg.val_dataloader, cfg.test_dataloader):
            resize, crop = loader.dataset.pipeline[:2]
            resize.size, crop.size = 36, 32
