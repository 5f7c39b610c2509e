"""torchvision's detectors: its own loss of one image, the mean of several, the same in slices."""

import pytest
import torch
import torchvision
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign

from memengine.engine.optim import AccumulationOptimWrapper, OptimWrapper
from memengine.models import TorchvisionDetector
from memengine.testing import assert_same_step

SMALL = dict(
    num_classes=3,
    backbone='resnet18',
    min_size=32,
    max_size=48,
    rpn_pre_nms_top_n_train=20,
    rpn_post_nms_top_n_train=10,
    rpn_post_nms_top_n_test=5,
    box_batch_size_per_image=8,
    box_roi_pool=MultiScaleRoIAlign(['0', '1', '2', '3'], output_size=1, sampling_ratio=2),
)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    file = tmp_path_factory.mktemp('weights') / 'resnet18.pth'
    torch.manual_seed(0)
    resnet = torchvision.models.resnet18().train()
    with torch.no_grad():
        resnet(torch.randn(8, 3, 32, 32))  # its statistics are no longer those of the beginning
    torch.save(resnet.state_dict(), file)
    return file


def build(checkpoint, **changes):
    torch.manual_seed(0)
    settings = {**SMALL, 'backbone_checkpoint': str(checkpoint), **changes}
    return TorchvisionDetector(**settings).double()


def batch():
    """Three images of different sizes, with one, two and three objects."""
    generator = torch.Generator().manual_seed(0)
    images, samples = [], []
    for count, (height, width) in enumerate([(32, 40), (48, 32), (32, 32)], start=1):
        images.append(torch.rand(3, height, width, generator=generator, dtype=torch.float64))
        corner = torch.rand(count, 2, generator=generator, dtype=torch.float64) * 12
        masks = torch.zeros(count, height, width, dtype=torch.bool)
        masks[:, 2:20, 2:20] = True
        samples.append(
            dict(
                boxes=torch.cat([corner, corner + 14], dim=1),
                labels=torch.arange(count) % 2 + 1,
                masks=masks,
                image_id=count,
            )
        )
    return dict(inputs=images, data_samples=samples)


def gradients(model, wrapper, data):
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    optimizer.zero_grad = lambda: None  # so that the gradients are left to be looked at
    torch.manual_seed(3)
    log = model.train_step(data, wrapper(optimizer))
    return log, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def test_one_image_has_torchvisions_own_losses(checkpoint):
    model, data = build(checkpoint).train(), batch()
    features = resnet_fpn_backbone(
        backbone_name='resnet18', weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=3
    )
    settings = {k: v for k, v in SMALL.items() if k not in ('num_classes', 'backbone')}
    theirs = FasterRCNN(features, 3, **settings).double().train()
    theirs.load_state_dict(model.detector.state_dict())
    sample = {key: data['data_samples'][1][key] for key in ('boxes', 'labels')}
    torch.manual_seed(5)
    expected = theirs([data['inputs'][1]], [sample])
    torch.manual_seed(5)
    one = model([data['inputs'][1]], [data['data_samples'][1]], mode='loss')
    assert_same_step(one, expected)
    assert set(one) == {
        'loss_classifier',
        'loss_box_reg',
        'loss_objectness',
        'loss_rpn_box_reg',
    }


@pytest.mark.parametrize(('detector', 'size'), [('FasterRCNN', 1), ('MaskRCNN', 2)])
def test_a_step_in_slices_is_the_plain_step(checkpoint, detector, size):
    model, data = build(checkpoint, detector=detector), batch()
    log, expected = gradients(model, OptimWrapper, data)
    assert ('loss_mask' in log) is (detector == 'MaskRCNN')
    model.zero_grad()
    sliced_log, sliced = gradients(
        model, lambda optimizer: AccumulationOptimWrapper(optimizer, micro_batch_size=size), data
    )
    assert_same_step(sliced_log, log)
    assert_same_step(sliced, expected)
    doubled = {name: 2 * gradient for name, gradient in expected.items()}
    with pytest.raises(AssertionError):
        assert_same_step(sliced, doubled)


def test_the_checkpoint_is_the_fixed_start(checkpoint):
    weights = torch.load(checkpoint)
    body = build(checkpoint).detector.backbone.body.float()
    assert torch.equal(body.layer4[0].conv1.weight, weights['layer4.0.conv1.weight'])
    assert torch.equal(body.bn1.running_var, weights['bn1.running_var'])
    trained = {name.split('.')[0] for name, p in body.named_parameters() if p.requires_grad}
    assert trained == {'layer2', 'layer3', 'layer4'}
    norms = [m for m in body.modules() if 'BatchNorm' in type(m).__name__]
    assert norms and all(isinstance(norm, FrozenBatchNorm2d) for norm in norms)


def test_without_checkpoint_all_is_trained():
    model = TorchvisionDetector(**SMALL)
    assert all(p.requires_grad for p in model.parameters())
    assert isinstance(model.detector.backbone.body.bn1, torch.nn.BatchNorm2d)


def test_predictions_are_of_the_images_own_size(checkpoint):
    model = build(checkpoint, detector='MaskRCNN', box_score_thresh=0.0).eval()
    with torch.no_grad():
        found = model(batch()['inputs'], mode='predict')
    assert len(found) == 3
    for image, one in zip(batch()['inputs'], found, strict=True):
        count = len(one['labels'])
        assert count > 0
        assert one['boxes'].shape == (count, 4)
        assert one['scores'].shape == (count,)
        assert one['masks'].shape == (count, 1, *image.shape[1:])


def test_what_does_not_fit_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match='detector must be one of FasterRCNN, MaskRCNN'):
        TorchvisionDetector('FastRCNN')
    with pytest.raises(ValueError, match='min_sise'):
        TorchvisionDetector(backbone='resnet18', min_sise=3)
    with pytest.raises(ValueError, match='resnet17'):
        TorchvisionDetector(backbone='resnet17')
    with pytest.raises(ValueError, match='there is no file backbone_checkpoint'):
        build(tmp_path / 'none.pth')
    with pytest.raises(ValueError, match='does not hold the weights of this ResNet'):
        build(checkpoint, backbone='resnet34')
    model, data = build(checkpoint, detector='MaskRCNN'), batch()
    with pytest.raises(ValueError, match='list_samples'):
        model(torch.stack(data['inputs'][2:]), data['data_samples'][2:], mode='loss')
    with pytest.raises(ValueError, match=r'labels must lie in 1\.\.2 .* got 3\.\.3'):
        wrong = {**data['data_samples'][0], 'labels': torch.tensor([3])}
        model(data['inputs'][:1], [wrong], mode='loss')
    del data['data_samples'][0]['masks']
    with pytest.raises(ValueError, match='has no masks; set masks=True'):
        model(**data, mode='loss')
