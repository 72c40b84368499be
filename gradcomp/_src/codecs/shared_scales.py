"""Shared scales: workers may agree on scales before they encode."""


class SharedScales:
  """A base of codecs with codes that add up as integers once scales are shared."""

  share_scale: bool

  @property
  def agrees(self) -> bool:
    return self.share_scale

  @property
  def summable(self) -> bool:
    return self.share_scale
