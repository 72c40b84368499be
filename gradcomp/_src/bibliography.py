"""The papers that codecs, exchanges and feedback come from, as BibTeX entries."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Citation(NamedTuple):
  """A paper that a codec, an exchange or feedback is taken from.

  Each of these may have an attribute or a property ``citations``, a tuple of papers,
  which :func:`gradcomp.citation` reads.

  Attributes:
    bibtex: the paper's BibTeX entry.
    departure: where the implementation departs from the paper, or what of it this is,
      in sentences.
  """

  bibtex: str
  departure: str


def cites(*citations: Citation) -> Callable[[_Function], _Function]:
  """Names the papers of a transformation at its ``update`` function."""

  def mark(function: _Function) -> _Function:
    function.__dict__["citations"] = citations
    return function

  return mark


def _entry(
  key: str, authors: str, title: str, year: int, arxiv: str = "", **fields: str
) -> str:
  """Returns a BibTeX entry, with the paper's number in arXiv if it has one."""
  fields = {"author": authors, "title": f"{{{title}}}", "year": str(year), **fields}
  if arxiv:
    fields |= {"eprint": arxiv, "archivePrefix": "arXiv"}
  lines = (f"  {name} = {{{value}}}" for name, value in fields.items())
  return f"@misc{{{key},\n" + ",\n".join(lines) + "\n}"


ALISTARH_2017 = _entry(
  "alistarh2017qsgd",
  "Alistarh, Dan and Grubic, Demjan and Li, Jerry and Tomioka, Ryota and Vojnovic, "
  "Milan",
  "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
  2017,
  "1610.02132",
)
CHEN_2020 = _entry(
  "chen2020scalecom",
  "Chen, Chia-Yu and others",
  "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient "
  "Distributed Training",
  2020,
  "2104.11125",
)
DETTMERS_2016 = _entry(
  "dettmers2016approximations",
  "Dettmers, Tim",
  "8-Bit Approximations for Parallelism in Deep Learning",
  2016,
  "1511.04561",
)
DOUILLARD_2023 = _entry(
  "douillard2023diloco",
  "Douillard, Arthur and others",
  "DiLoCo: Distributed Low-Communication Training of Language Models",
  2023,
  "2311.08105",
)
DOUILLARD_2025 = _entry(
  "douillard2025streaming",
  "Douillard, Arthur and Donchev, Yanislav and Rush, Keith and Kale, Satyen and "
  "Charles, Zachary and Garrett, Zachary and Teston, Gabriel and Lacey, Dave and "
  "McIlroy, Ross and Shen, Jiajun and Ram{\\'e}, Alexandre and Szlam, Arthur and "
  "Ranzato, Marc'Aurelio and Barham, Paul",
  "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
  2025,
  "2501.18512",
)
FANG_2018 = _entry(
  "fang2018redsync",
  "Fang, Jiarui and Fu, Haohuan and Yang, Guangwen and Hsieh, Cho-Jui",
  "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training "
  "System",
  2018,
  "1808.04357",
)
GRUBIC_2018 = _entry(
  "grubic2018synchronous",
  "Grubic, Demjan and Tam, Leo K. and Alistarh, Dan and Zhang, Ce",
  "Synchronous Multi-GPU Deep Learning with Low-Precision Communication: An "
  "Experimental Study",
  2018,
  doi="10.3929/ethz-b-000319485",
)
HAN_2021 = _entry(
  "han2021aps",
  "Han, Ruobing and Si, Min and Demmel, James and You, Yang",
  "Auto-Precision Scaling for Distributed Deep Learning",
  2021,
  "1911.08907",
)
HORVATH_2019 = _entry(
  "horvath2019natural",
  "Horv{\\'a}th, Samuel and others",
  "Natural Compression for Distributed Deep Learning",
  2019,
  "1905.10988",
)
JIA_2024 = _entry(
  "jia2024sdp4bit",
  "Jia, Jinda and Xie, Cong and Lu, Hanlin and Wang, Daoce and Feng, Hao and Zhang, "
  "Chengming and Sun, Baixi and Lin, Haibin and Zhang, Zhi and Liu, Xin and Tao, "
  "Dingwen",
  "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for "
  "LLM Training",
  2024,
  "2410.15526",
)
LIN_2018 = _entry(
  "lin2018dgc",
  "Lin, Yujun and Han, Song and Mao, Huizi and Wang, Yu and Dally, William J.",
  "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed "
  "Training",
  2018,
  "1712.01887",
)
MICIKEVICIUS_2017 = _entry(
  "micikevicius2017mixed",
  "Micikevicius, Paulius and others",
  "Mixed Precision Training",
  2017,
  "1710.03740",
)
RAJBHANDARI_2020 = _entry(
  "rajbhandari2020zero",
  "Rajbhandari, Samyam and Rasley, Jeff and Ruwase, Olatunji and He, Yuxiong",
  "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
  2020,
  "1910.02054",
)
SARFI_2025 = _entry(
  "sarfi2025sparseloco",
  "Sarfi, Amir and others",
  "Communication Efficient LLM Pre-training with SparseLoCo",
  2025,
  "2508.15706",
)
SEIDE_2014 = _entry(
  "seide2014onebit",
  "Seide, Frank and Fu, Hao and Droppo, Jasha and Li, Gang and Yu, Dong",
  "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed "
  "Training of Speech DNNs",
  2014,
  howpublished="Interspeech",
  url="https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html",
)
STICH_2018 = _entry(
  "stich2018memory",
  "Stich, Sebastian U. and Cordonnier, Jean-Baptiste and Jaggi, Martin",
  "Sparsified SGD with Memory",
  2018,
  "1809.07599",
)
STROM_2015 = _entry(
  "strom2015scalable",
  "Strom, Nikko",
  "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
  2015,
  howpublished="Interspeech",
  url="https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html",
)
VOGELS_2019 = _entry(
  "vogels2019powersgd",
  "Vogels, Thijs and Karimireddy, Sai Praneeth and Jaggi, Martin",
  "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
  2019,
  "1905.13727",
)
WEN_2017 = _entry(
  "wen2017terngrad",
  "Wen, Wei and Xu, Cong and Yan, Feng and Wu, Chunpeng and Wang, Yandan and Chen, "
  "Yiran and Li, Hai",
  "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
  2017,
  "1705.07878",
)
ZHANG_2017 = _entry(
  "zhang2017zipml",
  "Zhang, Hantian and Li, Jerry and Kara, Kaan and Alistarh, Dan and Liu, Ji and "
  "Zhang, Ce",
  "ZipML: Training Linear Models with End-to-End Low Precision, and a Little Bit of "
  "Deep Learning",
  2017,
  "1611.05402",
)
