// Modules are numbered by their order: the number that the builder gives the entry depends on the folder of the build.
module.exports = {
  optimization: {
    moduleIds: 'natural'
  }
};
