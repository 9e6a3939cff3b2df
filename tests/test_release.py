"""The script that builds and checks what is uploaded; `make release` runs all of it."""

import tarfile
import zipfile

import pytest

import kfc
import release


def test_code_changes_and_citation_have_the_same_version():
    assert release.version() == kfc.__version__


def test_versions_that_differ_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    (tmp_path / "src" / "kfc").mkdir(parents=True)
    (tmp_path / "src" / "kfc" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 0.2.0 (November 2026)\n")
    for cited in ("version: 0.1.0\n", "title: kfc\n"):
        (tmp_path / "CITATION.cff").write_text(cited)
        with pytest.raises(release.ReleaseError, match="the versions differ"):
            release.version()


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_packages_that_lack_or_add_files_are_refused(kind, tmp_path):
    name = "kfc_torch-0.2.0" + ("-py3-none-any.whl" if kind == "wheel" else ".tar.gz")
    prefix = "" if kind == "wheel" else "kfc_torch-0.2.0/src/"

    def packed(*names):
        (tmp_path / "empty").touch()
        if kind == "wheel":
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                for each in names:
                    archive.write(tmp_path / "empty", prefix + each)
        else:
            with tarfile.open(tmp_path / name, "w:gz") as archive:
                for each in names:
                    archive.add(tmp_path / "empty", prefix + each)
        return tmp_path / name

    release.check_content(packed(*release.PACKAGED))
    with pytest.raises(release.ReleaseError, match=r"lacks \['kfc_command\.py'\]"):
        release.check_content(packed(*release.PACKAGED[:-1]))
    foreign = "tests/test_optimizer.py" if kind == "wheel" else "kfc/__pycache__/kfc.pyc"
    with pytest.raises(release.ReleaseError, match="must not contain"):
        release.check_content(packed(*release.PACKAGED, foreign))


def test_a_command_that_fails_is_reported_with_what_it_printed(tmp_path):
    with pytest.raises(release.ReleaseError, match="No such file"):
        release.run("ls", "missing", folder=tmp_path)
    assert "No such file" in release.run("ls", "missing", folder=tmp_path, fails=True)
    with pytest.raises(release.ReleaseError, match="ended with 0"):
        release.run("ls", folder=tmp_path, fails=True)
