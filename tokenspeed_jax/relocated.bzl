"""`relocated`: files of another folder as files of this package, as the installed package has them."""

def _relocated_impl(ctx):
    moved = []
    for source in ctx.files.srcs:
        file = ctx.actions.declare_file(source.short_path)
        ctx.actions.symlink(output = file, target_file = source)
        moved.append(file)
    return [DefaultInfo(files = depset(moved))]

relocated = rule(
    implementation = _relocated_impl,
    doc = "Links `srcs` below this package, at their paths from the root of the tree.",
    attrs = {"srcs": attr.label_list(allow_files = True, mandatory = True)},
)
