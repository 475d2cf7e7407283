/**
 * A producer that parks long-delayed messages in delay-level topics. docs/wire.md specifies the
 * format; {@link delaylevel.client.DelayLevelProducer} is the class to begin with.
 */
package delaylevel.client;
